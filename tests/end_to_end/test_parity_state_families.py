"""Gated delta nets and Mamba2: greedy tokens and logits equal transformers' in float32,
however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import SamplingParams
from tests.end_to_end.test_parity_families import (
    assert_budgets_equal_transformers,
    assert_logits_close,
    assert_preempted_equals_transformers,
)
from tests.model_families import STATE_FAMILIES
from tests.parity_reference import (
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_tokens,
    run,
    tiny_llm,
    tokens_of,
)

TinyModel = Callable[..., Path]
DISTINCT = ("qwen3-next", "qwen3.5", "granite-hybrid", "granite-hybrid-moe")
in_every_family = pytest.mark.parametrize("family", STATE_FAMILIES)
in_distinct_families = pytest.mark.parametrize("family", DISTINCT)


@in_every_family
def test_logits_equal_transformers_at_every_position_in_chunks_of_an_odd_size(
    tiny_model: TinyModel, family: str
) -> None:
    assert_logits_close(tiny_model(family), max_num_batched_tokens=13)


@pytest.mark.parametrize("budget", [7, pytest.param(1, marks=pytest.mark.slow), 64])
@in_distinct_families
def test_greedy_tokens_equal_transformers_under_every_token_budget(
    tiny_model: TinyModel, family: str, budget: int
) -> None:
    assert_budgets_equal_transformers(tiny_model(family), budget)


@in_distinct_families
def test_greedy_tokens_equal_transformers_when_requests_are_preempted_repeatedly(
    tiny_model: TinyModel, family: str
) -> None:
    assert_preempted_equals_transformers(tiny_model(family))


@pytest.mark.parametrize("is_async", [True, False], ids=["steps in flight", "step by step"])
@in_every_family
def test_greedy_tokens_equal_transformers_cached_and_in_a_second_turn(
    tiny_model: TinyModel, family: str, is_async: bool
) -> None:
    """The same prompts again, then a branch from the middle of one, and every text going on:
    all from snapshots."""
    directory = tiny_model(family)
    prompts = random_prompts((1, 8, 33, 64, 17))
    with tiny_llm(directory, max_num_batched_tokens=24, async_scheduling=is_async) as llm:
        expected = reference_tokens(directory, prompts)
        assert greedy(llm, prompts) == expected
        again = run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=16))
        assert tokens_of(again) == expected
        assert all(
            output.num_cached_tokens > 0 for output in again if len(output.prompt_token_ids or ()) > 16
        )
        turns = [
            prompt + answer + ids for prompt, answer, ids in zip(prompts, expected, random_prompts((9,) * 5))
        ]
        turns.append(prompts[3][:40] + prompts[2])
        assert greedy(llm, turns) == reference_tokens(directory, turns)
        assert_pool_unused(llm)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # about twenty packages of a model with several kinds of layers
@in_distinct_families
def test_compiled_greedy_tokens_equal_transformers(tiny_model: TinyModel, family: str) -> None:
    directory = tiny_model(family)
    assert_budgets_equal_transformers(directory, 24, enforce_eager=False)
