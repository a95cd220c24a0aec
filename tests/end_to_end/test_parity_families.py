"""Greedy tokens and logits equal transformers' in float32, for every family, however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import SamplingParams
from tests import parity_reference
from tests.model_families import FAMILIES
from tests.parity_reference import (
    BLOCK_SIZE,
    MAX_TOKENS,
    assert_pool_unused,
    engine_logits,
    greedy,
    random_prompts,
    reference_logits,
    reference_tokens,
    run,
    tiny_llm,
    tokens_of,
)

TinyModel = Callable[..., Path]

BUDGETS = (1, 7, 64)
# Biases, full and windowed layers: every kind of attention graph at once. Norms around both sublayers, caps
# and two rotary tables; experts with a shared one; sinks and biased experts; latents.
COMPILED_FAMILIES = (
    "qwen2-window",
    "gemma2",
    "gemma3",
    "qwen2-moe",
    "gpt-oss",
    "deepseek-v2-groups",
    "gemma4-small",
)
# One of each structure: norms behind, both; two tables, caps, fused weights, pairs, multipliers; experts.
DISTINCT_FAMILIES = (
    *(
        "qwen3",
        "gemma2",
        "gemma3",
        "gemma3-far",
        "phi3-long",
        "olmo2",
        "olmo3",
        "glm4",
        "granite",
        "ministral3",
    ),
    *("qwen2-moe", "gpt-oss", "glm4-moe-groups", "deepseek-v3", "gemma4-small", "gemma4-experts"),
)
RELATIVE = 1e-4


def assert_equals_transformers(directory: Path, **settings: Any) -> None:
    """Whole prompts in one batch, the same ones again from the prefix cache, and then in other orders."""
    prompts = random_prompts()
    greedy_params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with tiny_llm(directory, **settings) as llm:
        answers = tokens_of(run(llm, prompts, greedy_params))
        expected = reference_tokens(directory, prompts)
        assert answers == expected

        before = llm.get_metrics().num_computed_tokens
        again = run(llm, prompts, greedy_params)
        assert tokens_of(again) == expected
        # Only full blocks are reused, and at least one token is computed.
        cached = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
        assert [output.num_cached_tokens for output in again] == cached
        suffixes = sum(len(p) - c + len(tokens) - 1 for p, c, tokens in zip(prompts, cached, expected))
        assert llm.get_metrics().num_computed_tokens - before == suffixes

        order = list(range(len(prompts)))
        for seed in range(2):
            random.Random(seed).shuffle(order)
            assert llm.reset_prefix_cache()
            assert greedy(llm, [prompts[i] for i in order]) == [expected[i] for i in order]
        assert_pool_unused(llm)


def assert_budgets_equal_transformers(directory: Path, budget: int, **settings: Any) -> None:
    prompts = random_prompts()
    with tiny_llm(directory, max_num_batched_tokens=budget, **settings) as llm:
        assert greedy(llm, prompts) == reference_tokens(directory, prompts)


def assert_preempted_equals_transformers(directory: Path, **settings: Any) -> None:
    """Six requests, most of which grow to 5 blocks, in a pool that holds 8."""
    prompts = random_prompts((7, 12, 1, 15, 9, 16))
    with tiny_llm(directory, max_model_len=40, num_gpu_blocks_override=1 + 8, **settings) as llm:
        assert greedy(llm, prompts, max_tokens=24) == reference_tokens(directory, prompts, max_tokens=24)
        assert llm.get_metrics().num_preemptions > 1
        assert_pool_unused(llm)


def assert_logits_close(directory: Path, **settings: Any) -> None:
    """Position by position over a prompt and its completion,
    prompt in chunks and completion token by token."""
    prompt = random_prompts((70,))[0]
    with tiny_llm(directory, **settings) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=8)
    expected = reference_logits(directory, prompt + completion[:-1])
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= RELATIVE * expected.abs().max()
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("wrong", ["a token", "the end", "all"])
def test_the_judge_takes_no_wrong_guess(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """What an engine says saves passes of transformers, and decides nothing."""
    directory, (prompt,) = tiny_model("llama"), random_prompts((12,), seed=3)
    monkeypatch.setattr(parity_reference, "_GUESSES", {})
    parity_reference._reference_tokens.cache_clear()
    [expected] = reference_tokens(directory, [prompt])
    other = [(token + 1) % 400 for token in expected]
    guess = {"a token": [*expected[:5], other[5], *expected[6:]], "the end": expected[:-1], "all": other}[
        wrong
    ]
    for given, is_confirmed in ((expected, True), (guess, False)):
        parity_reference._GUESSES[tuple(prompt)] = given
        parity_reference._reference_tokens.cache_clear()
        with monkeypatch.context() as patch:
            model = parity_reference.reference_model(directory, None)
            if is_confirmed:
                patch.setattr(model, "generate", lambda *_, **__: pytest.fail("one pass is enough"))
            assert reference_tokens(directory, [prompt]) == [expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_whole_cached_and_in_any_order(
    tiny_model: TinyModel, family: str
) -> None:
    assert_equals_transformers(tiny_model(family))


@pytest.mark.parametrize(
    "budget", [budget if budget == 7 else pytest.param(budget, marks=pytest.mark.slow) for budget in BUDGETS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_under_every_token_budget(
    tiny_model: TinyModel, family: str, budget: int
) -> None:
    assert_budgets_equal_transformers(tiny_model(family), budget)


@pytest.mark.parametrize(
    "family",
    [one if one in DISTINCT_FAMILIES else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES],
)
def test_greedy_tokens_equal_transformers_when_requests_are_preempted_repeatedly(
    tiny_model: TinyModel, family: str
) -> None:
    assert_preempted_equals_transformers(tiny_model(family))


@pytest.mark.parametrize("is_async", [True, False], ids=["steps in flight", "drafts"])
@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_greedy_tokens_equal_transformers_ahead_of_the_scheduler_and_in_a_second_turn(
    tiny_model: TinyModel, family: str, is_async: bool
) -> None:
    """Texts that repeat themselves, so that drafts are made, if none is in flight;
    and then every text goes on."""
    directory = tiny_model(family)
    pattern = random_prompts((5, 9, 12))
    prompts = [(ids * 8)[:length] for ids, length in zip(pattern, (31, 40, 17))]
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    settings = {"async_scheduling": True} if is_async else drafts
    with tiny_llm(directory, max_num_batched_tokens=16, **settings) as llm:
        answers = greedy(llm, prompts)
        expected = reference_tokens(directory, prompts)
        assert answers == expected
        assert is_async or llm.get_metrics().num_draft_tokens > 0
        turns = [prompt + answer + ids for prompt, answer, ids in zip(prompts, expected, pattern)]
        outputs = run(llm, turns, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        assert tokens_of(outputs) == reference_tokens(directory, turns)
        assert all(output.num_cached_tokens >= BLOCK_SIZE for output in outputs)
        assert_pool_unused(llm)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 69, 70, 71, 72])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo3"])
def test_logits_equal_transformers_with_windows_around_every_border(
    tiny_model: TinyModel, family: str, window: int
) -> None:
    """Of a block (8 tokens), and of the text (70 tokens, and 7 more)."""
    assert_logits_close(tiny_model(family, sliding_window=window), max_num_batched_tokens=13)


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.smoke) if one in ("llama", "gemma3") else one for one in FAMILIES],
)
def test_logits_equal_transformers_at_every_position(
    tiny_model: TinyModel, family: str, budget: int | None
) -> None:
    assert_logits_close(tiny_model(family), max_num_batched_tokens=budget)


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED_FAMILIES)
def test_compiled_greedy_tokens_equal_transformers_cached_reordered_and_preempted(
    tiny_model: TinyModel, family: str
) -> None:
    directory = tiny_model(family)
    assert_equals_transformers(directory, enforce_eager=False)
    assert_preempted_equals_transformers(directory, enforce_eager=False)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_greedy_tokens_and_logits_equal_transformers_in_every_setting(
    tiny_model: TinyModel, family: str
) -> None:
    directory = tiny_model(family)
    assert_equals_transformers(directory, enforce_eager=False)
    for budget in BUDGETS:
        assert_budgets_equal_transformers(directory, budget, enforce_eager=False)
    assert_preempted_equals_transformers(directory, enforce_eager=False)
    assert_logits_close(directory, enforce_eager=False, max_num_batched_tokens=7)
