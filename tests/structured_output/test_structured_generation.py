"""Structured output end to end, on a small random model:
whatever it is, what comes out keeps to the structure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from minivllm import LLM, RequestOutput, SamplingParams, StructuredOutputs
from minivllm.errors import RequestError

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{3}-(ab|cd)+"
CHOICES = ["red", "green", "grün\n"]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(
        str(tiny_model("llama")),
        enforce_eager=True,
        max_model_len=512,
        num_gpu_blocks_override=200,
        block_size=16,
    ) as llm:
        yield llm


def params(structured: StructuredOutputs | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "seed": 3, **fields}, structured_outputs=structured)


def json_only(**schema: Any) -> StructuredOutputs:
    return StructuredOutputs(json=schema["json"], disable_any_whitespace=True)


def generate(llm: LLM, *all_params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(["The quick brown fox"] * len(all_params), list(all_params))


def text_of(output: RequestOutput) -> str:
    assert output.error is None
    return output.outputs[0].text


def test_layers_that_forget_write_what_those_write_that_keep_everything(
    tiny_model: Callable[..., Path],
) -> None:
    """A model with windows of 16 tokens, and answers of several windows, drafted in part by the grammar."""
    model = str(tiny_model("qwen2-window", sliding_window=16))
    settings = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "block_size": 8}
    written = []
    for backend in ("sdpa", "minivllm.attention:SdpaAttention"):  # it is not known what a foreign one reads
        with LLM(model, attention_backend=backend, num_gpu_blocks_override=100, **settings) as llm:
            pools = [pool.name for pool in llm.get_metrics().kv_cache_pools]
            assert pools == ["full attention", *["sliding window of 16"] * (backend == "sdpa")]
            outputs = generate(
                llm,
                params(json_only(json=PERSON), temperature=0.0),
                params(StructuredOutputs(regex=r"([0-9]{3}-(ab|cd)+ ){12}"), temperature=0.0),
                params(StructuredOutputs(choice=CHOICES), temperature=0.0),
            )
            written.append([list(output.outputs[0].token_ids) for output in outputs])
            assert re.match(r"([0-9]{3}-(ab|cd)+ )+", text_of(outputs[1])) and text_of(outputs[2]) in CHOICES
    assert written[0] == written[1]
    assert len(written[0][1]) > 3 * 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_outputs_keep_to_their_structure_whatever_the_sampling(llm: LLM, temperature: float) -> None:
    structures = [
        json_only(json=PERSON),
        StructuredOutputs(json=PERSON, whitespace_pattern=" "),
        StructuredOutputs(regex=REGEX),
        StructuredOutputs(choice=CHOICES),
        StructuredOutputs(grammar='start: "x" NUMBER\nNUMBER: /[0-9]{1,9}/'),
        StructuredOutputs(json_object=True, disable_any_whitespace=True),
    ]
    variants: list[dict[str, Any]] = [
        {},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logprobs": 3, "logit_bias": {20: 50.0}},
        {"min_tokens": 4},
    ]
    cases = [(structure, variant) for structure in structures for variant in variants]
    outputs = generate(llm, *(params(s, temperature=temperature, **variant) for s, variant in cases))
    num_finished = 0
    for output, (structure, _) in zip(outputs, cases):
        if output.outputs[0].finish_reason == "length":
            continue
        num_finished += 1
        text = text_of(output)
        if structure.json is not None:
            Draft202012Validator(PERSON).validate(json.loads(text))
        elif structure.json_object:
            assert isinstance(json.loads(text), dict)
        elif structure.choice is not None:
            assert text in CHOICES
        else:
            assert re.fullmatch(structure.regex or "x[0-9]{1,9}", text)
    assert num_finished >= 20


def test_the_structure_has_the_last_word_over_min_tokens_and_bad_words(llm: LLM) -> None:
    [output] = generate(
        llm, params(StructuredOutputs(choice=["red"]), min_tokens=50, bad_words=["red", "r", "re"])
    )
    assert text_of(output) == "red"
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_a_pydantic_model_is_a_schema(llm: LLM) -> None:
    class City(BaseModel, extra="forbid"):
        capital: bool
        districts: int | None

    structured = StructuredOutputs(json=City, disable_any_whitespace=True)
    [output] = llm.chat([{"role": "user", "content": "Hi"}], params(structured, temperature=0.0))
    assert isinstance(City.model_validate_json(text_of(output)).capital, bool)


@pytest.mark.slow
def test_neighbours_generate_what_they_generate_alone(llm: LLM) -> None:
    plain = [
        params(None, max_tokens=30, seed=seed, temperature=temperature)
        for seed in (1, 2)
        for temperature in (0, 1)
    ]
    alone = [generate(llm, one)[0].outputs[0].token_ids for one in plain]
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    broken = [StructuredOutputs(regex="(a"), StructuredOutputs(json=overlapping)]
    outputs = generate(llm, *plain, *(params(s) for s in [*broken, StructuredOutputs(regex=REGEX)]))
    assert [output.outputs[0].token_ids for output in outputs[: len(plain)]] == alone
    assert [output.outputs[0].finish_reason for output in outputs[len(plain) :]] == ["error", "error", "stop"]
    assert "unclosed group" in str(outputs[-3].error)
    assert "the alternatives of oneOf" in str(outputs[-2].error)
    assert llm.get_metrics().kv_cache_usage == 0


def test_a_structured_output_is_the_same_alone_or_in_a_batch_with_n(llm: LLM) -> None:
    one = params(json_only(json=PERSON), n=3, seed=11)
    [alone] = generate(llm, one)
    both = generate(llm, params(StructuredOutputs(regex=REGEX)), one)
    assert [c.token_ids for c in both[1].outputs] == [c.token_ids for c in alone.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 3


@pytest.mark.parametrize(
    "limits",
    [{"max_num_batched_tokens": 9}, {"num_gpu_blocks_override": 13, "max_num_seqs": 6, "max_model_len": 180}],
)
def test_chunks_and_preemptions_change_nothing(
    tiny_model: Callable[..., Path], llm: LLM, limits: dict[str, int]
) -> None:
    wanted = [params(json_only(json=PERSON), seed=seed, max_tokens=100) for seed in range(6)]
    expected = [output.outputs[0].token_ids for output in generate(llm, *wanted)]
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 200, "block_size": 16} | limits
    with LLM(str(tiny_model("llama")), enforce_eager=True, **sizes) as other:
        assert [output.outputs[0].token_ids for output in generate(other, *wanted)] == expected
        assert other.get_metrics().num_preemptions > 0 or "max_num_batched_tokens" in limits


def test_a_schema_that_cannot_be_kept_to_is_refused_with_its_path_before_anything_runs(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a b": {"items": [{"not": {}}], "enum": [{"not": 1}]}}}
    steps = llm.get_metrics().num_steps
    with pytest.raises(RequestError, match=re.escape("""'not' at $.properties["a b"].items[0]""")):
        generate(llm, params(None), params(StructuredOutputs(json=schema)))
    assert llm.get_metrics().num_steps == steps
