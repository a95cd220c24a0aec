"""Over a generated family of JSON schemas, every finished output of a random model validates,
judged by jsonschema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from minivllm import LLM, SamplingParams, StructuredOutputs
from tests.structured_output.schema_family import make_schema

AT_ONCE = 30
NUM_SCHEMAS = 360


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(
        str(tiny_model("llama")), enforce_eager=True, max_model_len=512, num_gpu_blocks_override=600
    ) as llm:
        yield llm


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(AT_ONCE, NUM_SCHEMAS, AT_ONCE))],
)
def test_every_finished_output_validates(llm: LLM, first: int) -> None:
    schemas = [make_schema(seed) for seed in range(first, first + AT_ONCE)]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=300,
            seed=seed,
            structured_outputs=StructuredOutputs(json=schema, disable_any_whitespace=seed % 3 > 0),
        )
        for seed, schema in enumerate(schemas, first)
    ]
    num_finished = 0
    for schema, output in zip(schemas, llm.generate(["Write: "] * AT_ONCE, params)):
        assert output.error is None, schema
        [completion] = output.outputs
        if completion.finish_reason == "stop":
            num_finished += 1
            value = json.loads(completion.text)
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
    assert num_finished >= 0.8 * AT_ONCE
