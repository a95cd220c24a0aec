"""Models whose layers keep states:
second turns, steps in flight, and slots full of rubbish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm.specs.caches import LayerCache
from tests.parity_reference import (
    BLOCK_SIZE,
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_tokens,
    runner_of,
    tiny_llm,
)

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("is_async", [False, True], ids=["one by one", "steps in flight"])
@torch.inference_mode()
def test_a_second_turn_computes_only_what_is_new_and_no_slot_is_read_before_it_is_written(
    tiny_model: TinyModel, is_async: bool
) -> None:
    """NaN in all slots but the null one: a read of an unwritten state would spread it."""
    directory = tiny_model("lfm2")
    prompts = random_prompts((5, 21, 16, 30))
    with tiny_llm(directory, async_scheduling=is_async, max_num_seqs=3, max_num_batched_tokens=13) as llm:
        for cache in runner_of(llm).paged_model.caches:
            if not isinstance(cache, LayerCache):
                for tensor in cache:
                    tensor[1:-1] = torch.nan
        answers = greedy(llm, prompts)
        assert answers == reference_tokens(directory, prompts)
        turns = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers)]
        before = llm.get_metrics().num_computed_tokens
        assert greedy(llm, turns, 1) == reference_tokens(directory, turns, 1)
        # The last token of an answer was not computed; what lies behind the last full block before it is new.
        cached = [(len(turn) - 4) // BLOCK_SIZE * BLOCK_SIZE for turn in turns]
        assert llm.get_metrics().num_computed_tokens - before == sum(map(len, turns)) - sum(cached)
        assert_pool_unused(llm)
        for cache in runner_of(llm).paged_model.caches:
            if not isinstance(cache, LayerCache):
                assert all(not bool(tensor[0].any()) for tensor in cache), "the null slot holds zeros"
