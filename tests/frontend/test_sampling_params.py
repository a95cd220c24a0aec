"""Sampling parameters as vLLM's users write them:
None is the default, and a wrong type is told by the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import SamplingParams
from minivllm.errors import RequestError


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_none_is_the_default_of_every_field(name: str) -> None:
    if name == "max_tokens":  # here None has a meaning of its own, as in vLLM
        assert SamplingParams(max_tokens=None).max_tokens is None
    else:
        assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@pytest.mark.parametrize(
    "value",
    [object(), {1: object()}, [object()], "abc", b"x", 1.5, "", [""]],
    ids=["object", "dict", "list", "text", "bytes", "float", "empty text", "list of an empty text"],
)
def test_a_wrong_type_is_a_sentence_that_names_the_field(name: str, value: Any) -> None:
    try:
        made = getattr(SamplingParams(**{name: value}), name)
    except RequestError as error:
        assert str(error).startswith((name, "'")) or name in str(error), error
    else:
        assert made == value or made == [value]


def test_tuples_are_lists_and_one_string_is_one_stop_string() -> None:
    params = SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2), stop_regex="x")  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.stop_regex) == (["a", "b"], [1, 2], ["x"])


@pytest.mark.parametrize("name", ["stop", "stop_regex", "bad_words"])
def test_an_empty_string_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} has an empty string"):
        SamplingParams(**{name: [""]})


def test_a_start_of_prompt_logprobs_needs_prompt_logprobs() -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs_start is 3, but .* set prompt_logprobs as well"):
        SamplingParams(prompt_logprobs_start=3)
    assert SamplingParams(prompt_logprobs_start=3, prompt_logprobs=0).prompt_logprobs_start == 3


def test_named_logprobs_are_logprobs() -> None:
    assert SamplingParams(logprob_token_ids=[5, 3]).logprobs == 0
    assert SamplingParams(logprob_token_ids=[5, 3], logprobs=4).logprobs == 4
    for few_or_many in ([], [1] * 1001):
        with pytest.raises(
            RequestError, match=f"logprob_token_ids is {len(few_or_many)}, but must be 1 to 1000 ids"
        ):
            SamplingParams(logprob_token_ids=few_or_many)
