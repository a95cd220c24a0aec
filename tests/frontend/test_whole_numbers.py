"""Whole numbers in sampling parameters: as large as a process can send to another, and no larger."""

from __future__ import annotations

import msgspec
import pytest

from minivllm import BeamSearchParams, SamplingParams
from minivllm.errors import RequestError
from minivllm.sampling_params import MAX_INTEGER, RepetitionDetection

NAMES = ("top_k", "min_tokens", "max_tokens", "thinking_budget")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [10**30, MAX_INTEGER + 1])
def test_a_number_that_no_message_carries_is_refused_with_its_bound(name: str, value: int) -> None:
    with pytest.raises(RequestError, match=rf"{name} is {value}, but must be .* and at most {MAX_INTEGER}\."):
        SamplingParams(**{name: value})


def test_lists_and_other_structures_have_the_same_bound() -> None:
    for broken in (
        lambda: SamplingParams(stop_token_ids=[10**30]),
        lambda: SamplingParams(allowed_token_ids=[10**30]),
        lambda: SamplingParams(logit_bias={10**30: 1.0}),
        lambda: RepetitionDetection(max_pattern_size=2, min_count=10**30),
        lambda: BeamSearchParams(beam_width=2, max_tokens=10**30),
    ):
        with pytest.raises(RequestError, match=f"at most {MAX_INTEGER}"):
            broken()


def test_the_largest_numbers_travel_and_say_no_more_than_they_did() -> None:
    params = SamplingParams(
        top_k=MAX_INTEGER, max_tokens=MAX_INTEGER, min_tokens=0, thinking_budget=MAX_INTEGER
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(RequestError, match=r"top_k is -2, but must be a whole number of at least -1\."):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize("name", ["top_k", "temperature", "top_p", "seed"])
def test_a_number_of_thousands_of_digits_is_refused_in_a_short_sentence(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is a number of 33220 bits, but must be") as caught:
        SamplingParams(**{name: 10**10_000})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
