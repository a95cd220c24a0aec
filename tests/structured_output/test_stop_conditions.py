"""Repetition, thinking budgets and best-of: what ends or chooses an output beyond tokens and strings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, OutputKind, RepetitionDetection, SamplingParams, StructuredOutputs
from minivllm.errors import RequestError
from minivllm.messages import EngineRequest
from minivllm.request import Request, RequestStatus, Stop
from minivllm.stop_conditions.repetition import RepetitionDetector
from minivllm.stop_conditions.stopping import append_until_stop
from minivllm.structured_output.grammar import ThinkingBudget

START, END = [90, 91], [92, 93, 94]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(
        str(tiny_model("llama")),
        enforce_eager=True,
        max_model_len=256,
        num_gpu_blocks_override=200,
        block_size=16,
    ) as llm:
        yield llm


def repeats(token_ids: list[int], params: RepetitionDetection) -> bool:
    """Straight from the definition."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        length = size * params.min_count
        if len(token_ids) >= length and token_ids[-length:] == token_ids[-size:] * params.min_count:
            return True
    return False


class Failing:
    """A stop condition that fails on one token."""

    def append(self, token_id: int) -> Stop | None:
        return Stop(RequestStatus.FINISHED_ERROR, error="It failed.") if token_id == 9 else None


def test_a_token_on_which_a_condition_fails_is_no_part_of_the_output() -> None:
    params = SamplingParams()
    request = Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[5],
            sampling_params=params,
            max_tokens=8,
            seed=0,
            arrival_time=0.0,
        )
    )
    request.stop_conditions.append(Failing())
    assert append_until_stop(request, [7, 8, 9, 7]) == [7, 8]
    assert request.output_token_ids == [7, 8]
    assert (request.status, request.error) == (RequestStatus.FINISHED_ERROR, "It failed.")


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(2, 4),
    st.integers(0, 20),
)
def test_repetition_stops_at_the_first_token_that_completes_it(
    token_ids: list[int], smallest: int, more: int, min_count: int, min_tokens: int
) -> None:
    params = RepetitionDetection(
        min_pattern_size=smallest, max_pattern_size=smallest + more, min_count=min_count
    )
    detector = RepetitionDetector(params, min_tokens)
    for count in range(1, len(token_ids) + 1):
        stop = detector.append(token_ids[count - 1])
        assert (stop is not None) == (repeats(token_ids[:count], params) and count >= min_tokens)


def test_an_output_that_goes_round_in_circles_ends_with_the_reason_repetition(llm: LLM) -> None:
    detection = RepetitionDetection(max_pattern_size=3, min_count=4)
    params = SamplingParams(
        temperature=0.0, max_tokens=60, allowed_token_ids=[7], repetition_detection=detection, ignore_eos=True
    )
    [output] = llm.generate("Hello", params)
    assert output.outputs[0].token_ids == [7] * 4
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "repetition")


@pytest.mark.parametrize("fields", [{"max_pattern_size": 0}, {"max_pattern_size": 2, "min_pattern_size": 3}])
def test_impossible_repetitions_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="_pattern_size is"):
        RepetitionDetection(**fields)


def allowed(budget: ThinkingBudget, drafts: list[int]) -> list[int | None]:
    """The only token of each row, None where all may come."""
    rows = np.full((1 + len(drafts), 4), -1, dtype=np.int32)
    budget.fill(rows, drafts)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return [None if row.all() else int(np.flatnonzero(row)[0]) for row in bits if row.all() or row.sum() == 1]


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("opens_in_prompt", [True, False])
def test_the_closing_tag_is_forced_after_the_budget_and_nothing_else(
    limit: int, opens_in_prompt: bool
) -> None:
    prompt = [3, *START] if opens_in_prompt else [3]
    budget = ThinkingBudget(limit, START, END, prompt)
    text = [*([] if opens_in_prompt else [4, *START]), *([8] * limit)]
    for place, token in enumerate(text):
        assert allowed(budget, text[place:]) == [*([None] * (len(text) - place)), END[0]]
        budget.append(token)
    assert budget.valid_drafts([*END, 5]) == [*END, 5]
    assert budget.valid_drafts([END[0], 5]) == END[:1]
    for place, token in enumerate(END):
        assert budget.forced_tokens() == END[place:]
        assert allowed(budget, []) == [token]
        budget.append(token)
    assert allowed(budget, [8] * 20) == [None] * 21


def test_a_thought_that_ends_by_itself_is_left_alone_and_the_next_one_has_a_budget_of_its_own() -> None:
    budget = ThinkingBudget(2, START, END, [])
    for token in [*START, 8, *END]:
        budget.append(token)
    assert budget.forced_tokens() == []
    for token in [*START, 8, 8]:
        budget.append(token)
    assert budget.forced_tokens() == END


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thinking_ends_within_its_budget_in_the_engine(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=60,
        thinking_budget=9,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    closing = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    [thinking] = llm.generate("Hello <think>", params)
    assert thinking.outputs[0].token_ids[9 : 9 + len(closing)] == closing


def test_best_of_gives_the_likeliest_completions_best_first(llm: LLM) -> None:
    base: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    [every] = llm.generate("Hello", SamplingParams(n=6, logprobs=0, **base))
    [best] = llm.generate("Hello", SamplingParams(n=2, best_of=6, **base))
    expected = sorted(
        every.outputs, key=lambda completion: -float(completion.cumulative_logprob or math.nan)
    )[:2]
    assert [completion.token_ids for completion in best.outputs] == [
        completion.token_ids for completion in expected
    ]
    assert [completion.index for completion in best.outputs] == [0, 1]
    assert [completion.cumulative_logprob for completion in best.outputs] == pytest.approx(
        [completion.cumulative_logprob for completion in expected], rel=1e-5
    )
    assert all(completion.logprobs is None for completion in best.outputs)


def test_best_of_contradicts_streams_and_fewer_completions_than_n(llm: LLM) -> None:
    with pytest.raises(RequestError, match="best_of is 2"):
        SamplingParams(n=3, best_of=2)
    params = SamplingParams(n=1, best_of=2, output_kind=OutputKind.DELTA)
    with pytest.raises(RequestError, match="known at the end only"):
        llm.llm_engine.add_request(None, "Hello", params)


def test_a_thinking_budget_contradicts_a_structure() -> None:
    with pytest.raises(RequestError, match="contradict each other"):
        SamplingParams(thinking_budget=3, structured_outputs=StructuredOutputs(regex="a"))
