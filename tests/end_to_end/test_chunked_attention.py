"""Layers that attend in chunks (Llama 4) give what transformers gives on both sides of every border.

The judge is the model as transformers runs it: float32, the whole text in one pass, masks and all.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import SamplingParams
from tests.end_to_end.test_kv_groups import FEW, assert_pools_unused, names_of_groups
from tests.parity_reference import (
    BLOCK_SIZE,
    engine_logits,
    random_prompts,
    reference_logits,
    run,
    runner_of,
    tiny_llm,
    tokens_of,
)
from tests.transformers_models.families import FAMILIES, VOCAB, save_model

CHUNK = 2 * BLOCK_SIZE
GREEDY = SamplingParams(temperature=0.0, max_tokens=CHUNK + 4, ignore_eos=True)
"""Every answer begins in one chunk and ends in another."""
BORDERS = (1, *(border + step for border in (BLOCK_SIZE, CHUNK, 2 * CHUNK) for step in (-1, 0, 1)))
FEW_PROMPTS = ("one token a step", "a chunk of 17")
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "one token a step": {"max_num_batched_tokens": 1},
    "few blocks and chunks": FEW | {"max_num_batched_tokens": 11},
    "async with few blocks": FEW | {"async_scheduling": True},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    },
    "sdpa": {"attention_backend": "sdpa"},
    "a chunk of 17": {"max_num_batched_tokens": 7},
    "blocks of 32": {"block_size": 32, "num_gpu_blocks_override": 1 + 40, "max_num_batched_tokens": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunked")


def llama4(folder: Path, chunk: int = CHUNK) -> Path:
    """Layers of chunks, and one with full attention and without rotary embedding; the second has experts."""
    directory = folder / str(chunk)
    if not directory.exists():
        differences = {**FAMILIES["llama4_text"][0], "attention_chunk_size": chunk, "num_hidden_layers": 4}
        save_model(directory, "llama4_text", {**differences, "no_rope_layers": [1, 1, 0, 1]})
    return directory


@lru_cache(maxsize=256)
def greedy_after(directory: Path, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
    """What the model says most likely at every place of an answer."""
    logits: Tensor = reference_logits(directory, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def assert_greedy(directory: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, answers):
        assert greedy_after(directory, tuple(prompt), tuple(answer)) == answer, len(prompt)


@pytest.mark.parametrize("setting", SETTINGS)
def test_chunks_that_are_forgotten_equal_transformers(folder: Path, setting: str) -> None:
    """Twice, so that the second round finds prefixes."""
    chunk = 17 if setting == "a chunk of 17" else CHUNK
    directory, prompts = llama4(folder, chunk), random_prompts(BORDERS, VOCAB)
    if "few" in setting:
        prompts = prompts[3:]
    if setting == "n-grams":  # texts that repeat themselves, so that there is something to guess
        prompts = [prompt * 2 for prompt in prompts[2:7]]
    if setting in FEW_PROMPTS:
        prompts = prompts[5:8]
    with tiny_llm(directory, **SETTINGS[setting]) as llm:
        assert names_of_groups(llm) == [("full attention", 1), (f"chunked attention of {chunk}", 3)]
        sizes = [group.block_size for group in runner_of(llm).limits.groups]
        assert sizes == ([32, 16] if setting == "blocks of 32" else [BLOCK_SIZE] * 2)
        for _ in range(2):
            assert_greedy(directory, prompts, tokens_of(run(llm, prompts, GREEDY)))
            assert_pools_unused(llm)
        stats = llm.get_metrics()
        assert ("few" in setting) == (stats.num_preemptions > 0)
        assert "few" in setting or stats.prefix_cache_hit_tokens > 0
        assert (setting == "n-grams") == (stats.num_drafts > 0)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_small_chunks_equal_transformers_at_every_position(folder: Path, chunk: int) -> None:
    directory, prompt = llama4(folder, chunk), random_prompts((37,), VOCAB)[0]
    with tiny_llm(directory, max_num_batched_tokens=5) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=20)
    expected = reference_logits(directory, prompt + completion[:-1])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_second_turn_hits_wherever_the_first_one_ended_in_its_chunk(folder: Path) -> None:
    directory = llama4(folder)
    with tiny_llm(directory) as llm:
        for length in (2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + BLOCK_SIZE):
            [first] = random_prompts((length,), VOCAB, seed=length)
            [answer] = tokens_of(run(llm, [first], GREEDY))
            second = [*first, *answer, 9, 8, 7]
            [output] = run(llm, [second], GREEDY)
            assert output.num_cached_tokens == (len(first) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert_greedy(directory, [second], tokens_of([output]))


def test_what_stands_in_chunks_that_were_left_is_never_read(folder: Path) -> None:
    """All blocks of the chunks' pool that no request holds are filled with huge values before every step."""
    directory, prompts = llama4(folder), random_prompts((50, 23), VOCAB)
    with tiny_llm(directory, max_num_batched_tokens=9) as llm:
        manager = llm.llm_engine.client.core.scheduler.kv_cache_manager  # type: ignore[attr-defined]
        runner, num_spoiled = runner_of(llm), 0
        launch = runner.launch

        def spoil_and_launch(*args: Any) -> Any:
            nonlocal num_spoiled
            free = torch.tensor([block.block_id for block in manager.pools[1].free_queue])
            for layer in runner.limits.groups[1].layers:
                for tensor in runner.paged_model.caches[layer][:2]:
                    num_spoiled += int((tensor[free] != 1e6).flatten(1).any(1).sum())
                    tensor[free] = 1e6
            return launch(*args)

        runner.launch = spoil_and_launch  # type: ignore[method-assign]
        assert_greedy(directory, prompts, tokens_of(run(llm, prompts, GREEDY)))
        assert num_spoiled > 2 * 3 * (manager.pools[1].num_blocks - 1), "more than each block once"
