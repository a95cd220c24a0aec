"""n completions of one prompt: the prompt is computed and stored once,
and each is what its own seed gives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from tests.parity_reference import BLOCK_SIZE, assert_pool_unused, random_prompts, run, tiny_llm, tokens_of

TinyModel = Callable[..., Path]
PROMPT = random_prompts((40,), seed=5)[0]
N, MAX_TOKENS = 6, 12
SHARED = SamplingParams(temperature=1.0, seed=40, n=N, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(tiny_model: TinyModel) -> list[list[int]]:
    """What each seed gives when nothing else runs and nothing is cached."""
    completions = []
    with tiny_llm(tiny_model("llama"), enable_prefix_caching=False) as llm:
        for index in range(N):
            own = SamplingParams(temperature=1.0, seed=40 + index, max_tokens=MAX_TOKENS, ignore_eos=True)
            completions += tokens_of(run(llm, [PROMPT], own))
    assert len({tuple(tokens) for tokens in completions}) == N
    return completions


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"max_model_len": 56, "num_gpu_blocks_override": 1 + 10},
        {"max_model_len": 56, "num_gpu_blocks_override": 1 + 10, "enable_prefix_caching": False},
    ],
    ids=[
        "together",
        "chunked",
        "two at a time",
        "no prefix cache",
        "preempted",
        "preempted without prefix cache",
    ],
)
def test_completions_are_those_of_their_own_seeds(
    tiny_model: TinyModel, alone: list[list[int]], settings: dict[str, Any]
) -> None:
    with tiny_llm(tiny_model("llama"), **settings) as llm:
        [output] = run(llm, [PROMPT], SHARED)
        assert [completion.token_ids for completion in output.outputs] == alone
        assert_pool_unused(llm)
        if "num_gpu_blocks_override" in settings and settings.get("enable_prefix_caching", True):
            assert llm.get_metrics().num_preemptions > 0


def computed_tokens(llm: LLM, params: SamplingParams) -> int:
    before = llm.get_metrics().num_computed_tokens
    run(llm, [PROMPT], params)
    return llm.get_metrics().num_computed_tokens - before


@pytest.mark.parametrize("budget", [None, 16])
def test_the_prompt_is_computed_once(tiny_model: TinyModel, budget: int | None) -> None:
    with tiny_llm(tiny_model("llama"), max_num_batched_tokens=budget) as llm:
        # The first computes all of the prompt, each other one its last block only:
        # one token must run to give logits.
        last_block = len(PROMPT) - (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
        decoded = N * (MAX_TOKENS - 1)
        assert computed_tokens(llm, SHARED) == len(PROMPT) + (N - 1) * last_block + decoded
    with tiny_llm(tiny_model("llama"), enable_prefix_caching=False) as llm:
        assert computed_tokens(llm, SHARED) == N * len(PROMPT) + decoded


def test_the_prompt_is_stored_once(tiny_model: TinyModel) -> None:
    """Six sequences of seven blocks each hold 4 shared blocks and 3 of their own, instead of 42."""
    with tiny_llm(tiny_model("llama")) as llm:
        engine = llm.llm_engine
        pool = engine.client.core.scheduler.kv_cache_manager.pools[0]  # type: ignore[attr-defined]
        engine.add_request(None, {"prompt_token_ids": PROMPT}, SHARED)
        most_in_use = 0
        while engine.has_unfinished_requests():
            engine.step()
            most_in_use = max(most_in_use, pool.num_blocks - 1 - pool.num_free_blocks)
        assert most_in_use == 4 + N * 3
