"""Outputs with speculation equal those without it, token by token,
with any drafter and any quality of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.processing.outputs import RequestOutput
from minivllm.spec_decode.drafter import Drafter, DraftTask
from minivllm.spec_decode.speculation import measured_step_cost
from tests.parity_reference import (
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_tokens,
    run,
    tiny_llm,
    tokens_of,
)
from tests.spec_decode.scripted_drafter import ScriptedDrafter, speculation_of

TinyModel = Callable[..., Path]

FAMILY = "qwen3"
MAX_TOKENS = 24
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"method": "ngram", "prompt_lookup_min": 1, "verification_cost": 0.0},
    {"method": "suffix", "verification_cost": 0.0},
    {"method": "early_exit", "num_layers": 2, "num_speculative_tokens": 3, "verification_cost": 0.0},
)
# Repeated beginnings give the lookups something to find; one prompt is longer than the smaller budgets.
_WORDS = random_prompts((6, 9, 7), seed=21)
PROMPTS = [_WORDS[0] * 3, _WORDS[1], _WORDS[2] * 2 + _WORDS[0] + _WORDS[2], _WORDS[0], _WORDS[1] * 4]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=3, repetition_penalty=1.4),
    SamplingParams(
        temperature=0.8, seed=5, max_tokens=MAX_TOKENS, presence_penalty=0.6, frequency_penalty=0.3
    ),
    SamplingParams(
        temperature=1.0, seed=6, top_p=0.9, top_k=40, max_tokens=MAX_TOKENS, min_tokens=9, logprobs=0
    ),
    SamplingParams(temperature=0.3, seed=7, max_tokens=MAX_TOKENS, prompt_logprobs=1, n=3, ignore_eos=True),
)


def key_of(output: RequestOutput) -> list[Any]:
    """Everything of an output that speculation must not change."""
    return [
        (
            list(c.token_ids),
            c.text,
            c.finish_reason,
            c.stop_reason,
            _ids(c.logprobs),
            _ids(output.prompt_logprobs),
        )
        for c in output.outputs
    ]


def _ids(logprobs: Any) -> Any:
    """Token ids and ranks of reported log-probabilities;
    the values are compared elsewhere, within rounding."""
    if logprobs is None:
        return None
    return [
        None if entry is None else [(token, value.rank) for token, value in entry.items()]
        for entry in logprobs
    ]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model(FAMILY)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[RequestOutput]:
    """What an engine without speculation answers."""
    with tiny_llm(model) as llm:
        return run(llm, PROMPTS, PARAMS)


def scripted_llm(model: Path, plain: list[RequestOutput], error_rate: float, **settings: Any) -> LLM:
    """An engine whose drafter knows what will be said, up to a rate of errors."""
    llm = tiny_llm(model, speculative_config={"method": "ngram", "verification_cost": 0.0}, **settings)
    texts = [prompt + list(c.token_ids) for prompt, output in zip(PROMPTS, plain) for c in output.outputs]
    speculation_of(llm).drafter = ScriptedDrafter(texts, error_rate, vocab_size=416)
    return llm


def assert_same(outputs: list[RequestOutput], plain: list[RequestOutput]) -> None:
    assert [key_of(output) for output in outputs] == [key_of(output) for output in plain]
    for output, expected in zip(outputs, plain):
        for completion, reference in zip(output.outputs, expected.outputs):
            assert completion.cumulative_logprob == pytest.approx(reference.cumulative_logprob, abs=1e-3)
            for entry, other in zip(completion.logprobs or [], reference.logprobs or []):
                for token in other:
                    assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("config", DRAFTERS, ids=lambda config: config["method"])
def test_greedy_tokens_equal_transformers(model: Path, config: dict[str, Any]) -> None:
    with tiny_llm(model, speculative_config=config) as llm:
        for _ in range(2):  # the second time from the prefix cache, with earlier outputs to look at
            assert greedy(llm, PROMPTS) == reference_tokens(model, PROMPTS)
        metrics = llm.get_metrics()
        assert metrics.num_drafts > 0
        assert (
            metrics.num_accepted_tokens > 0 or config["method"] == "early_exit"
        )  # random layers rarely agree
        assert_pool_unused(llm)


@pytest.mark.parametrize("budget", [None, 7, 1])
@pytest.mark.parametrize("config", DRAFTERS, ids=lambda config: config["method"])
def test_everything_equals_the_engine_without_speculation(
    model: Path, plain: list[RequestOutput], config: dict[str, Any], budget: int | None
) -> None:
    with tiny_llm(model, speculative_config=config, max_num_batched_tokens=budget) as llm:
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        assert llm.get_metrics().num_drafts > 0 or budget == 1
        assert_pool_unused(llm)


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_everything_is_equal_whether_guesses_are_right_or_wrong(
    model: Path, plain: list[RequestOutput], error_rate: float
) -> None:
    with scripted_llm(model, plain, error_rate) as llm:
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        metrics = llm.get_metrics()
        assert metrics.num_draft_tokens > 0
        if error_rate == 1.0:
            assert metrics.num_accepted_tokens == 0
        else:
            assert metrics.num_accepted_tokens > 0
        assert_pool_unused(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("error_rate", [0.0, 0.5])
def test_everything_is_equal_when_requests_are_preempted(
    model: Path, plain: list[RequestOutput], error_rate: float, caching: bool
) -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 1 + 12}
    with scripted_llm(model, plain, error_rate, enable_prefix_caching=caching, **settings) as llm:
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        assert llm.get_metrics().num_preemptions > 1
        assert_pool_unused(llm)


def test_guesses_that_are_right_save_steps_and_are_counted_by_position(
    model: Path, plain: list[RequestOutput]
) -> None:
    params = PARAMS[0]
    with tiny_llm(model) as llm:
        run(llm, PROMPTS[:1], params)
        steps = llm.get_metrics().num_steps
    with scripted_llm(model, plain, 0.0) as llm:
        assert tokens_of(run(llm, PROMPTS[:1], params)) == tokens_of(plain[:1])
        metrics = llm.get_metrics()
    # 1 token from the prompt, then 8 in each step: 7 guesses and the bonus.
    assert (steps, metrics.num_steps) == (24, 1 + 3)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 20, 20)
    assert metrics.num_accepted_tokens_per_position == [3, 3, 3, 3, 3, 3, 2]


def test_hopeless_guesses_stop_and_good_ones_go_on(model: Path, plain: list[RequestOutput]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with tiny_llm(model) as llm:
        text = PROMPTS[1] + tokens_of(run(llm, PROMPTS[1:2], params))[0]
    steps, proposed = {}, {}
    for error_rate in (0.0, 1.0):
        with tiny_llm(model, speculative_config={"method": "ngram", "verification_cost": 0.1}) as llm:
            drafter = ScriptedDrafter([text], error_rate, vocab_size=416)
            speculation_of(llm).drafter = drafter
            assert PROMPTS[1] + tokens_of(run(llm, PROMPTS[1:2], params))[0] == text
            steps[error_rate], proposed[error_rate] = llm.get_metrics().num_steps, drafter.num_proposed
    assert steps[0.0] <= 1 + -(-99 // 8) + 1
    assert steps[1.0] == 100
    # Verifying one more token costs a tenth of a step: all the wrong ones together less than three.
    assert proposed[1.0] < 30


class WildDrafter(Drafter):
    """Knows the text, and guesses tokens behind it that no model has; more of them than it was asked for."""

    cost_per_token = 0.0

    def __init__(self, text: list[int], wild: int) -> None:
        self._text, self._wild = text, wild

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        known = [len(task.token_ids) for task in tasks]
        return {
            task.request_id: [*self._text[n : n + 2], self._wild, *self._text[:99]]
            for task, n in zip(tasks, known)
        }


@pytest.mark.parametrize("wild", [416, -1, 2**40])
def test_guesses_outside_the_vocabulary_are_dropped_and_those_before_them_count(
    model: Path, wild: int, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_llm(model) as llm:
        (text,) = greedy(llm, PROMPTS[1:2])
    with tiny_llm(model, speculative_config={"method": "ngram", "verification_cost": 0.0}) as llm:
        speculation = speculation_of(llm)
        speculation.drafter = WildDrafter(PROMPTS[1] + text, wild)
        speculation.lengths.choose = lambda request_id, batch_size: 5  # type: ignore[method-assign]
        assert greedy(llm, PROMPTS[1:2]) == [text]
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
        assert_pool_unused(llm)
    assert caplog.text.count("WildDrafter guesses tokens outside the vocabulary of 416") == 1


def test_requests_that_end_or_are_aborted_leave_nothing_behind(model: Path) -> None:
    with tiny_llm(model, speculative_config={"method": "suffix"}) as llm:
        stopped = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=list(range(0, 416, 3))
        )
        outputs = run(llm, PROMPTS, stopped)
        assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
        engine = llm.llm_engine
        engine.add_request(
            "gone", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=50, ignore_eos=True)
        )
        for _ in range(4):
            engine.step()
        engine.abort_request(["gone"])
        run(llm, PROMPTS[:1], stopped)
        run(llm, PROMPTS[:1], stopped)  # ids that ended reach the worker with the next step
        speculation = speculation_of(llm)
        assert len(speculation.lengths._records) <= 1
        assert len(speculation.drafter._own) <= 1  # type: ignore[attr-defined]
        assert_pool_unused(llm)


@pytest.mark.slow
def test_compiled_verification_gives_the_same_tokens_and_compiles_nothing_after_warm_up(
    tiny_model: TinyModel,
) -> None:
    directory = tiny_model("qwen2-window")  # layers with and without a window: every kind of attention graph
    with tiny_llm(directory) as llm:
        plain = run(llm, PROMPTS, PARAMS)
    with scripted_llm(directory, plain, error_rate=0.3, enforce_eager=False) as llm:
        for batch in (slice(0, 5), slice(1, 2)):
            outputs = run(llm, PROMPTS[batch], PARAMS[batch])
            assert tokens_of(outputs) == tokens_of(plain[batch])
        metrics = llm.get_metrics()
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


def test_the_cost_of_verification_is_measured_in_steps() -> None:
    seconds = {
        0: 2.0,
        1: 2.4,
        7: 3.6,
    }  # 0.1 steps for each of six more drafts, and as much again for drafting at all
    verify_fixed, verify_token = measured_step_cost(seconds.__getitem__, 7)
    assert (verify_fixed, verify_token) == (pytest.approx(0.1), pytest.approx(0.1))
    assert measured_step_cost({0: 2.0, 1: 1.9}.__getitem__, 1) == (0.0, 0.0)


def test_tenants_do_not_see_each_others_answers_in_what_is_guessed(model: Path) -> None:
    """Sampled text that no prompt holds is guessed only where the same tenant was told it before."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    with tiny_llm(model, speculative_config={"method": "suffix", "verification_cost": 0.0}) as llm:
        accepted = [0]
        for salt in ("mine", "theirs", "mine"):
            llm.generate({"prompt_token_ids": PROMPTS[1], "cache_salt": salt}, params, use_tqdm=False)
            accepted.append(llm.get_metrics().num_accepted_tokens)
    first, others, again = (after - before for before, after in pairwise(accepted))
    assert others == first < again
