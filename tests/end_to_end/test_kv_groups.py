"""Models with sliding windows keep only what their windows show,
and give what transformers gives nevertheless."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from tests.parity_reference import (
    BLOCK_SIZE,
    assert_pool_unused,
    engine_logits,
    greedy,
    random_prompts,
    reference_logits,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tokens_of,
)
from tests.spec_decode.drafting_cases import always_drafts
from tests.spec_decode.eagle_heads import random_head

TinyModel = Callable[..., Path]
WINDOW = 2 * BLOCK_SIZE
BORDERS = (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK_SIZE, 3 * WINDOW + 3)
"""Lengths of prompts, on both sides of the window's borders."""
FEW: dict[str, Any] = {"max_model_len": 72, "num_gpu_blocks_override": 1 + 9}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "one token a step": {"max_num_batched_tokens": 1},
    "few blocks": FEW,
    "few blocks and chunks": FEW | {"max_num_batched_tokens": 11},
    "async": {"async_scheduling": True},
    "async with few blocks": FEW | {"async_scheduling": True},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    },
    "first layers": {
        "speculative_config": {"method": "early_exit", "num_layers": 2, "verification_cost": 0.0}
    },
    "sdpa": {"attention_backend": "sdpa"},
    "no prefix cache": {"enable_prefix_caching": False},
}
DISTINCT_SETTINGS = ("whole prompts", "few blocks and chunks", "n-grams")
"""Those of every family by default; the first family has all of them."""


def windowed(tiny_model: TinyModel, family: str, window: int = WINDOW) -> Path:
    """qwen2: 4 layers, the first with full attention. smollm3: two of each in turn.
    mistral: windows everywhere."""
    if family == "qwen2":
        return tiny_model("qwen2-window", num_hidden_layers=4, sliding_window=window)
    if family == "smollm3":
        return tiny_model("smollm3", num_hidden_layers=4, use_sliding_window=True, sliding_window=window)
    return tiny_model("mistral-window", sliding_window=window)


def names_of_groups(llm: LLM) -> list[tuple[str, int]]:
    return [(group.name, len(group.layers)) for group in runner_of(llm).limits.groups]


GROUPS = {
    "qwen2": [("full attention", 1), (f"sliding window of {WINDOW}", 3)],
    "smollm3": [("full attention", 2), (f"sliding window of {WINDOW}", 2)],
    "mistral": [(f"sliding window of {WINDOW}", 3)],
}


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (one[0] != "qwen2" and one[1] not in DISTINCT_SETTINGS))
        for one in itertools.product(GROUPS, SETTINGS)
    ],
)
def test_windows_that_forget_equal_transformers(tiny_model: TinyModel, family: str, setting: str) -> None:
    """Twice, so that the second round finds prefixes."""
    directory = windowed(tiny_model, family)
    prompts = random_prompts(BORDERS)
    expected = reference_tokens(directory, prompts, max_tokens=20)
    if setting == "n-grams":  # texts that repeat themselves, so that there is something to guess
        prompts = [prompt * 2 for prompt in prompts[:3]]
        expected = reference_tokens(directory, prompts, max_tokens=20)
    with tiny_llm(directory, **SETTINGS[setting]) as llm:
        assert names_of_groups(llm) == GROUPS[family]
        for _ in range(2):
            assert greedy(llm, prompts, max_tokens=20) == expected
            assert_pools_unused(llm)
        stats = llm.get_metrics()
        if "few blocks" not in setting:
            assert (stats.prefix_cache_hit_tokens > 0) == (setting != "no prefix cache")
        assert ("few blocks" not in setting) or family == "mistral" or stats.num_preemptions > 0
        assert ("speculative_config" in SETTINGS[setting]) == (stats.num_drafts > 0)


def assert_pools_unused(llm: LLM) -> None:
    assert_pool_unused(llm)
    for pool in llm.llm_engine.client.core.scheduler.kv_cache_manager.pools:  # type: ignore[attr-defined]
        assert pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("window", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_small_windows_equal_transformers_at_every_position(tiny_model: TinyModel, window: int) -> None:
    directory, prompt = windowed(tiny_model, "qwen2", window), random_prompts((37,))[0]
    with tiny_llm(directory, max_num_batched_tokens=5) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=20)
    expected = reference_logits(directory, prompt + completion[:-1])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


BLOCKS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "few blocks": {"num_gpu_blocks_override": 1 + 3},
    "async": {"async_scheduling": True},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    },
}


@pytest.mark.parametrize("setting", BLOCKS)
def test_a_short_window_has_smaller_blocks_and_hits_end_where_both_kinds_do(
    tiny_model: TinyModel, setting: str
) -> None:
    """Blocks of 64 tokens for full attention, of 16 for a window of 17: 64 tokens are found, or 128, in whole
    blocks. A copy of the block of 64 gives the others, whose last ones are in a block of 16 as well."""
    directory, prompts = windowed(tiny_model, "qwen2", 17), random_prompts((16, 17, 63, 64, 65, 80))
    expected = reference_tokens(directory, prompts)
    with tiny_llm(directory, block_size=64, **BLOCKS[setting]) as llm:
        full, window = runner_of(llm).limits.groups
        assert (full.block_size, window.block_size) == (64, 16)
        caches = runner_of(llm).paged_model.caches
        assert [cache.blocks for cache in caches] == [(full.num_blocks, 64), *[(window.num_blocks, 16)] * 3]
        for _ in range(2):
            assert greedy(llm, prompts) == expected
            assert_pools_unused(llm)
        assert ("few" in setting) == (llm.get_metrics().num_preemptions > 0)
        outputs = run(llm, [[*prompts[-1], *expected[-1], 5]], SamplingParams(temperature=0.0, max_tokens=1))
        assert "few" in setting or outputs[0].num_cached_tokens == 80 + len(expected[-1]) - 1


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_what_stands_in_blocks_that_were_freed_is_never_read(tiny_model: TinyModel, backend: str) -> None:
    """All free blocks of the window's pool are filled with NaN before every step."""
    directory, prompts = windowed(tiny_model, "qwen2"), random_prompts((50, 23))
    with tiny_llm(directory, attention_backend=backend, max_num_batched_tokens=9) as llm:
        manager = llm.llm_engine.client.core.scheduler.kv_cache_manager  # type: ignore[attr-defined]
        runner, num_spoiled = runner_of(llm), 0
        launch = runner.launch

        def spoil_and_launch(*args: Any) -> Any:
            nonlocal num_spoiled
            for group, pool in zip(runner.limits.groups, manager.pools):
                free = [block.block_id for block in pool.free_queue]
                num_spoiled += len(
                    [block for block in free if runner.paged_model.caches[group.layers[0]].k[block].any()]
                )
                for layer in group.layers:
                    for tensor in runner.paged_model.caches[layer][:2]:
                        tensor[torch.tensor(free)] = torch.nan
                        assert not tensor[NULL_BLOCK_ID].isnan().any()
            return launch(*args)

        runner.launch = spoil_and_launch  # type: ignore[method-assign]
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)
        assert num_spoiled > 0


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_second_turn_hits_although_the_first_one_outgrew_the_window(
    tiny_model: TinyModel, family: str
) -> None:
    directory = windowed(tiny_model, family)
    first = random_prompts((40,))[0]
    with tiny_llm(directory) as llm:
        answer = greedy(llm, [first], max_tokens=20)[0]
        second = first + answer + [9, 8, 7, 6]
        [output] = run(llm, [second], SamplingParams(temperature=0.0, max_tokens=8))
        assert output.num_cached_tokens == (len(first) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert tokens_of([output]) == reference_tokens(directory, [second], max_tokens=8)


def test_a_long_answer_holds_only_a_window_of_blocks(tiny_model: TinyModel) -> None:
    """Blocks of 9 windows in a row, in a pool that has room for less than 3."""
    directory, prompt = windowed(tiny_model, "mistral"), random_prompts((5,))[0]
    with tiny_llm(directory, num_gpu_blocks_override=1 + 6, max_num_batched_tokens=16, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        [output] = run(llm, [prompt], params)
        assert len(output.outputs[0].token_ids) == 100 and llm.get_metrics().num_preemptions == 0
        completion = list(output.outputs[0].token_ids)
    logits = reference_logits(directory, prompt + completion[:-1])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == completion


def test_a_window_that_no_request_outgrows_is_full_attention(tiny_model: TinyModel) -> None:
    with tiny_llm(windowed(tiny_model, "qwen2", 64), max_model_len=64) as llm:
        assert names_of_groups(llm) == [("full attention", 4)]
    with tiny_llm(windowed(tiny_model, "qwen2", 63), max_model_len=64) as llm:
        assert names_of_groups(llm) == [("full attention", 1), ("sliding window of 63", 3)]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_what_a_draft_model_knows_lies_beside_full_attention(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, method: str
) -> None:
    directory, prompts = windowed(tiny_model, family), random_prompts(BORDERS)
    fused = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else {}
    draft = (
        tiny_model("llama") if method == "draft_model" else random_head(tmp_path / "head", method, **fused)
    )
    speculative = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": 3,
        "verification_cost": 0.0,
    }
    with caplog.at_level(logging.INFO), tiny_llm(directory, speculative_config=speculative) as llm:
        expected = GROUPS[family] if family == "qwen2" else [("full attention", 3)]
        assert names_of_groups(llm) == expected
        reason = "keep all keys and values, since the draft model keeps its own in the same blocks"
        assert (reason in caplog.text) == (family == "mistral")
        for _ in range(2):
            assert greedy(always_drafts(llm), prompts) == reference_tokens(directory, prompts)
        assert llm.get_metrics().num_drafts > 0
        assert_pools_unused(llm)


def test_attention_of_somebody_else_may_read_whatever_it_likes(tiny_model: TinyModel) -> None:
    directory, prompts = windowed(tiny_model, "qwen2"), random_prompts(BORDERS)
    with tiny_llm(directory, attention_backend="minivllm.attention:SdpaAttention") as llm:
        assert names_of_groups(llm) == [("full attention", 4)]
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)


def test_a_sleep_gives_the_memory_of_all_pools_back(tiny_model: TinyModel) -> None:
    directory, prompts = windowed(tiny_model, "qwen2"), random_prompts(BORDERS)
    with tiny_llm(directory) as llm:
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)
        worker: Any = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        before = worker.memory_bytes()["kv_cache"]
        llm.sleep(1)
        assert worker.memory_bytes()["kv_cache"] == 0
        llm.wake_up()
        assert worker.memory_bytes()["kv_cache"] == before > 0
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)


@pytest.mark.slow
def test_compiled_windows_that_forget_equal_transformers_without_recompiling(tiny_model: TinyModel) -> None:
    directory, prompts = windowed(tiny_model, "qwen2"), random_prompts(BORDERS)
    with tiny_llm(directory, enforce_eager=False, max_num_batched_tokens=20) as llm:
        assert names_of_groups(llm) == GROUPS["qwen2"]
        for _ in range(2):
            assert greedy(llm, prompts) == reference_tokens(directory, prompts)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]
        assert_pools_unused(llm)


def test_the_start_up_line_and_the_statistics_name_the_pools(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    megabyte = 2**20
    with (
        caplog.at_level(logging.INFO),
        tiny_llm(
            windowed(tiny_model, "qwen2"), num_gpu_blocks_override=None, kv_cache_memory_bytes=megabyte
        ) as llm,
    ):
        full, window = runner_of(llm).limits.groups
        assert f"full attention in 1 layer: {full.num_blocks - 1:,} blocks of 8 tokens, " in caplog.text
        assert (
            f"sliding window of {WINDOW} in 3 layers: {window.num_blocks - 1:,} blocks of 8 tokens, "
            in caplog.text
        )
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        assert 0.9 * megabyte < core.executor.worker.memory_bytes()["kv_cache"] <= megabyte
        pools = llm.get_metrics().kv_cache_pools
        assert [(pool.name, pool.num_blocks, pool.usage) for pool in pools] == [
            ("full attention", full.num_blocks - 1, 0.0),
            (f"sliding window of {WINDOW}", window.num_blocks - 1, 0.0),
        ]
