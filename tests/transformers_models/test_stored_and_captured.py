"""Compressed checkpoints, structured output and graphs of steps over the layers of transformers.

The judge of stored formats is transformers with the values that are stored.
Graphs are noted and repeated on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from jsonschema import Draft202012Validator

from minivllm import LLM, SamplingParams, StructuredOutputs
from minivllm.config import CudaGraphMode
from tests.attention.backends import choose_as_on_a_gpu
from tests.end_to_end.test_compressed_tensors import (
    PER_TOKEN,
    Settings,
    all_but_the_head,
    compressed_copy,
    group,
    weights,
)
from tests.model_families import save_word_tokenizer
from tests.parity_reference import runner_of, tiny_llm
from tests.quantization.test_mxfp4 import gpt_oss_copies
from tests.transformers_models.families import GPT_OSS, save_model
from tests.transformers_models.test_features import EXPERTS, SHORT, WIDE, check_tokens, use_regions
from tests.transformers_models.test_parity import WAYS, reference
from tutorials.recorded_graphs import RecordedGraphs

COMPRESSED = [
    pytest.param("olmo2", WIDE, group("pack-quantized", weights()), WAYS[0], True, 1e-3, id="int4"),
    pytest.param(
        "granite",
        WIDE,
        group("pack-quantized", weights(symmetric=False)),
        {},
        False,
        1e-3,
        id="int4 with zeros",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "seed_oss",
        WIDE,
        group("int-quantized", weights(8, "channel")),
        SHORT,
        True,
        1e-3,
        id="int8",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "granite",
        WIDE,
        group("int-quantized", weights(8, "channel"), inputs=PER_TOKEN),
        {},
        True,
        5e-2,
        id="w8a8",
    ),
    pytest.param(
        "olmo2",
        WIDE,
        group("float-quantized", weights(8, "channel", "float")),
        WAYS[1],
        False,
        1e-3,
        id="fp8",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "granite",
        WIDE,
        group("float-quantized", weights(8, "block", "float")),
        {},
        True,
        1e-3,
        id="fp8 blocks",
    ),
    pytest.param(
        "qwen3_moe", EXPERTS, group("pack-quantized", weights()), SHORT, True, 1e-3, id="int4 experts"
    ),
]


@pytest.mark.parametrize(("family", "shape", "form", "way", "cuts", "slack"), COMPRESSED)
def test_compressed_tensors_are_multiplied_as_their_values_are(
    family: str,
    shape: dict[str, Any],
    form: Settings,
    way: dict[str, Any],
    cuts: bool,
    slack: float,
    tmp_path: Path,
) -> None:
    source = save_model(tmp_path / "source", family, shape)
    stored, plain, _ = compressed_copy(source, tmp_path, [form], ["lm_head"], all_but_the_head)
    llm = tiny_llm(stored, model_impl="transformers", max_model_len=64, **way)
    if cuts:
        use_regions(llm)
    check_tokens(llm, reference(plain), slack)


@pytest.mark.parametrize("cuts", [False, True], ids=["modules", "regions"])
def test_experts_in_mxfp4_are_multiplied_as_their_values_are(cuts: bool, tmp_path: Path) -> None:
    source = save_model(
        tmp_path / "source", "gpt_oss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 64}
    )
    stored, plain = gpt_oss_copies(source, tmp_path)
    llm = tiny_llm(stored, model_impl="transformers", max_model_len=64, max_num_batched_tokens=11)
    if cuts:
        use_regions(llm)
    check_tokens(llm, reference(plain), 1e-3)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("settings", [{"async_scheduling": True}, WAYS[1]], ids=["async", "n-grams"])
def test_structures_hold_the_rows_that_have_one_and_no_others(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = save_model(tmp_path, "olmo2", {"vocab_size": 416})
    save_word_tokenizer(directory)
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=128, **settings)
    use_regions(llm)
    structures = [
        StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        None,
        StructuredOutputs(regex=r"[0-9]{3}-(ab|cd)"),
        StructuredOutputs(choice=["red", "green"]),
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=own) for own in structures]
    written, free, matched, chosen = (output.outputs[0] for output in llm.generate(["The quick"] * 4, params))
    Draft202012Validator(SCHEMA).validate(json.loads(written.text))
    assert len(matched.text) == 6 and matched.text[3] == "-" and chosen.text in ("red", "green")
    [alone] = llm.generate(["The quick"], SamplingParams(temperature=0.0, max_tokens=60))
    assert free.token_ids == alone.outputs[0].token_ids


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An uncompiled engine with graphs that takes the choices of a GPU."""
    backend = choose_as_on_a_gpu(monkeypatch)

    def make(directory: Path, mode: str, cuts: bool, **settings: Any) -> LLM:
        llm = tiny_llm(
            directory, model_impl="transformers", max_model_len=64, attention_backend=backend, **settings
        )
        if cuts:
            use_regions(llm)
        with torch.inference_mode():
            runner_of(llm).capture_graphs(mode, RecordedGraphs())  # type: ignore[arg-type]
        return llm

    return make


CAPTURED = [
    pytest.param(family, cuts, mode, marks=() if is_quick else pytest.mark.slow)
    for family, cuts, quick in (
        ("olmo2", True, "full_and_piecewise"),
        ("olmo2", False, "full_decode"),
        ("gemma2", True, ""),
        ("gpt_oss", True, "piecewise"),
    )
    for mode in get_args(CudaGraphMode)
    if mode != "none"
    for is_quick in [mode == quick]
]


@pytest.mark.parametrize(("family", "cuts", "mode"), CAPTURED)
def test_graphs_give_the_tokens_of_transformers(
    with_graphs: Callable[..., LLM], tmp_path: Path, family: str, cuts: bool, mode: str
) -> None:
    shape = {"gpt_oss": GPT_OSS, "gemma2": {"sliding_window": 8}}.get(family, {})
    directory = save_model(tmp_path, family, shape)
    llm = with_graphs(directory, mode, cuts, max_num_batched_tokens=24, max_num_seqs=5)
    check_tokens(llm, reference(directory), 1e-3)
    graphs = runner_of(llm).graphs
    assert graphs is not None and sum(graphs.num_replays.values()) > 8
