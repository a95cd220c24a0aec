"""Prefixes that are reused to the token give the tokens of prefixes that are reused by blocks,
whatever else is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.batch.step_inputs import Row
from minivllm.messages import BlockCopy, SchedulerStats
from minivllm.simulation.ranks import virtual_llm
from tests.end_to_end.test_chunked_attention import llama4
from tests.lora.lora_adapters import random_adapter
from tests.parity_reference import (
    assert_pool_unused,
    random_prompts,
    reference_tokens,
    run,
    runner_of,
    tiny_settings,
    tokens_of,
)
from tests.spec_decode.drafting_cases import always_drafts
from tests.spec_decode.eagle_heads import crafted_model, knowing_head, random_head
from tests.spec_decode.scripted_drafter import speculation_of

TinyModel = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
SEVERAL = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, n=4)
BASE, *OTHERS = random_prompts((80, 9, 9, 9, 70), vocab_size=90, seed=3)
BLOCK_SIZE = 32


def texts(llm: LLM) -> list[list[int]]:
    """Answers to prompts that repeat earlier ones, go on with their answers,
    and part from them inside blocks."""
    [answer] = tokens_of(run(llm, [BASE], GREEDY))
    prompts = [BASE, BASE + answer + OTHERS[0], BASE[:75] + OTHERS[1], BASE[:45] + OTHERS[2], OTHERS[3]]
    answers = tokens_of(run(llm, prompts, [GREEDY, GREEDY, SEEDED, GREEDY, GREEDY]))
    [several] = run(llm, [BASE[:50] + OTHERS[1]], SEVERAL)
    return [answer, *answers, *(list(one.token_ids) for one in several.outputs)]


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return tiny_settings(model, **{"block_size": BLOCK_SIZE, **more})


def answers_of(llm: LLM, rounds: int = 1) -> tuple[list[list[int]], SchedulerStats]:
    """Of every round, and the counters at the end."""
    with llm:
        answers = [texts(llm) for _ in range(rounds)]
        llm.llm_engine.client.call("check_integrity")
        stats = llm.llm_engine.client.stats()
        assert stats.kv_cache_usage == 0.0
        assert all(others == answers[0] for others in answers), "the second time as the first time"
        return answers[0], stats


@lru_cache(maxsize=1)
def by_blocks(model: Path) -> list[list[int]]:
    """Answers of an engine that reuses whole blocks."""
    answers, stats = answers_of(LLM(**settings(model, reuse_partial_blocks=False)))
    assert stats.prefix_cache_hit_tokens > 0 == stats.prefix_cache_copied_tokens
    return answers


def assert_equal(model: Path, make: Callable[..., LLM] = LLM, rounds: int = 1, **more: Any) -> SchedulerStats:
    """The answers are those with whole blocks; the engine's counters."""
    answers, stats = answers_of(make(**settings(model, **more)), rounds)
    assert answers == by_blocks(model)
    assert stats.prefix_cache_copied_tokens > 0
    return stats


FEW: dict[str, Any] = {"num_gpu_blocks_override": 1 + 8, "max_num_seqs": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 24},
    "few blocks": FEW,
    "async": {"async_scheduling": True},
    "async, few blocks, chunks": FEW | {"async_scheduling": True, "max_num_batched_tokens": 24},
    "n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    },
    "first layers": {
        "speculative_config": {"method": "early_exit", "num_layers": 2, "verification_cost": 0.0},
    },
    "offloaded": {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
    "offloaded, few blocks": FEW | {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
    "plain blocks": {"attention_backend": "sdpa"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_transformers_and_of_whole_blocks(tiny_model: TinyModel, setting: str) -> None:
    """Twice, so that blocks are lost, loaded and found again."""
    model = tiny_model("llama")
    stats = assert_equal(model, rounds=2, **SETTINGS[setting])
    assert by_blocks(model)[0] == reference_tokens(model, [BASE], max_tokens=16)[0]
    assert stats.prefix_cache_copied_tokens >= 15 + 31 + 11 + 13 or "few" in setting


@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}], ids=["in turn", "async"])
def test_preempted_requests_come_back_with_copies(tiny_model: TinyModel, more: dict[str, Any]) -> None:
    """Four prompts with 40 tokens in common, whose answers need a block more than there are."""
    model = tiny_model("llama")
    prompts = [BASE[:40] + OTHERS[3][start : start + 20] for start in range(0, 48, 12)]
    expected = reference_tokens(model, prompts, max_tokens=16)
    with LLM(**settings(model, **more, num_gpu_blocks_override=1 + 8)) as llm:
        for _ in range(3):
            assert tokens_of(run(llm, prompts, GREEDY)) == expected
        stats = llm.llm_engine.client.stats()
        assert stats.num_preemptions > 0 < stats.prefix_cache_copied_tokens
        assert_pool_unused(llm)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2-window": {"num_hidden_layers": 4, "sliding_window": 40},
    "mistral-window": {"sliding_window": 24},
    "gemma3": {},
    "deepseek-v2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_latent_keys_are_copied(tiny_model: TinyModel, family: str) -> None:
    assert_equal(tiny_model(family, **FAMILIES[family]))


def test_chunks_are_copied(tmp_path: Path) -> None:
    assert_equal(llama4(tmp_path, 40))


def test_blocks_of_fewer_bits_are_copied(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    answers, _ = answers_of(LLM(**settings(model, kv_cache_dtype="bfloat16")))
    assert (
        answers
        == answers_of(LLM(**settings(model, kv_cache_dtype="bfloat16", reuse_partial_blocks=False)))[0]
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": True},
        {"pipeline_parallel_size": 2, "kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
    ],
    ids=["two parts", "two stages", "two of each, async", "two stages, offloaded"],
)
def test_every_worker_copies_its_layers(tiny_model: TinyModel, layout: dict[str, Any]) -> None:
    assert_equal(tiny_model("llama"), virtual_llm, **layout)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_draft_model_finds_its_keys_and_values_in_copied_blocks(tiny_model: TinyModel, parts: int) -> None:
    """It is the target itself, so it errs only where its cache does not hold what it believes."""
    model = tiny_model("llama")
    config = {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 3,
        "verification_cost": 0.0,
    }
    check_drafts(model, config, parts)


@pytest.mark.parametrize("parts", [1, 2])
def test_an_eagle_head_finds_features_in_copied_blocks(
    tiny_model: TinyModel, tmp_path: Path, parts: int
) -> None:
    model = crafted_model(tmp_path / "model", tiny_model("mistral", sliding_window=2))
    head = knowing_head(tmp_path / "eagle", "eagle", model)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "verification_cost": 0.0}
    check_drafts(model, config, parts)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafters_compute_no_token_of_a_copy_again(
    tiny_model: TinyModel, tmp_path: Path, method: str
) -> None:
    """What they know of the places in a block is copied with it."""
    model = tiny_model("llama")
    guesser = model if method == "draft_model" else random_head(tmp_path / "head", "eagle")
    config = {"method": method, "model": str(guesser), "num_speculative_tokens": 3, "verification_cost": 0.0}
    with LLM(**settings(model, speculative_config=config)) as llm:
        drafter: Any = speculation_of(always_drafts(llm)).drafter
        run(llm, [BASE], GREEDY)
        starts: list[int] = []
        compute = drafter._compute

        def recorded(rows: list[Row], **settings: Any) -> Any:
            starts.extend(row.start for row in rows)
            return compute(rows, **settings)

        drafter._compute = recorded
        run(llm, [BASE], GREEDY)
        assert starts and min(starts) >= len(BASE) - 2


def test_features_are_copied_with_the_tokens_that_they_are_of(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A head reads that of the last token again, whose successor is another one now."""
    model, head = tiny_model("llama"), random_head(tmp_path / "head", "eagle")
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "verification_cost": 0.0}
    with LLM(**settings(model, speculative_config=config)) as llm:
        runner, copies, features = runner_of(llm), list[BlockCopy](), speculation_of(llm).drafter._features
        run(llm, [BASE], GREEDY)
        copy_blocks = runner.copy_blocks
        runner.copy_blocks = lambda given: (copies.extend(given), copy_blocks(given))
        run(llm, [BASE[:75] + OTHERS[1]], GREEDY)
        [copy] = copies
        assert features[copy.source, :11].any()
        assert torch.equal(features[copy.target, :11], features[copy.source, :11])


def check_drafts(model: Path, config: dict[str, Any], parts: int) -> None:
    stats = assert_equal(model, virtual_llm, speculative_config=config, tensor_parallel_size=parts)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_adapters_and_tenants_share_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapters = [random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("ab")]
    with LLM(**settings(model, enable_lora=True)) as llm:
        for lora in (None, *adapters):
            outputs = llm.generate([{"prompt_token_ids": BASE}], GREEDY, lora_request=lora, use_tqdm=False)
            assert outputs[0].num_cached_tokens == 0
        for salt in ("one", "two"):
            outputs = llm.generate([{"prompt_token_ids": BASE, "cache_salt": salt}], GREEDY, use_tqdm=False)
            assert outputs[0].num_cached_tokens == 0
        again = llm.generate([{"prompt_token_ids": BASE, "cache_salt": "one"}], GREEDY, use_tqdm=False)
        assert again[0].num_cached_tokens == len(BASE) - 1


@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
def test_prompt_logprobs_from_a_position_on_leave_the_prompt_before_it_in_the_cache(
    tiny_model: TinyModel, more: dict[str, Any]
) -> None:
    """Four choices of 3 tokens compute 4 tokens each: the last of the prompt, and themselves."""
    choices, start = [BASE + OTHERS[3][place : place + 3] for place in range(0, 12, 3)], len(BASE)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start)
    whole = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(**settings(tiny_model("llama"), **more)) as llm:
        expected = run(llm, choices, whole)
        before = llm.get_metrics().num_computed_tokens
        outputs = run(llm, choices, scored)
        assert llm.get_metrics().num_computed_tokens - before == 4 * 4
        for output, reference in zip(outputs, expected):
            assert output.num_cached_tokens == start - 1 and output.prompt_logprobs is not None
            assert output.prompt_logprobs[:start] == [None] * start
            for got, wanted in zip(
                output.prompt_logprobs[start:], reference.prompt_logprobs[start:], strict=True
            ):
                assert {token: one.logprob for token, one in got.items()} == pytest.approx(
                    {token: one.logprob for token, one in wanted.items()}, abs=1e-4
                )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_compiled_code_gives_equal_tokens(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family, **FAMILIES.get(family, {}))
    assert_equal(model, enforce_eager=False, max_num_batched_tokens=64)
