"""Structure and drafts: jumping ahead and speculation change how many steps it takes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams, StructuredOutputs
from minivllm.structured_output.manager import StructuredOutputManager

SCHEMA = {
    "type": "object",
    "properties": {
        "first name": {"enum": ["a", "b"]},
        "second name": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["first name", "second name"],
    "additionalProperties": False,
}
STRUCTURES = [
    StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputs(regex="(the quick brown fox ){2}[0-9]{1,3} jumps"),
    StructuredOutputs(choice=["one two three four", "one two four three"]),
]


def run(model: Path, **engine_args: Any) -> tuple[list[list[int]], int]:
    params = [
        SamplingParams(temperature=temperature, seed=5, max_tokens=80, structured_outputs=structured, **extra)
        for structured in STRUCTURES
        for temperature, extra in ((0.0, {}), (1.0, {}), (1.0, {"frequency_penalty": 1.0, "logprobs": 1}))
    ]
    sizes = {"enforce_eager": True, "max_model_len": 256, "num_gpu_blocks_override": 90, "block_size": 16}
    with LLM(str(model), **sizes, **engine_args) as llm:
        outputs = llm.generate(["one two three the quick brown fox"] * len(params), params)
        assert all(output.error is None for output in outputs)
        return [output.outputs[0].token_ids for output in outputs], llm.get_metrics().num_steps


def test_structures_and_speculation_give_the_tokens_of_structures_alone(
    tiny_model: Callable[..., Path],
) -> None:
    speculating, _ = run(
        tiny_model("llama"), speculative_config={"method": "ngram", "num_speculative_tokens": 3}
    )
    alone, _ = run(tiny_model("llama"))
    assert speculating == alone


def test_jumping_ahead_gives_the_same_tokens_in_fewer_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, fewer_steps = run(tiny_model("llama"))
    monkeypatch.setattr(StructuredOutputManager, "jump_ahead", lambda self: {})
    one_by_one, steps = run(tiny_model("llama"))
    assert ahead == one_by_one
    assert fewer_steps < steps
