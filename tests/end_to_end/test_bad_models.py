"""A model's files that cannot be right are refused in one sentence,
before memory is taken for weights or a cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.checkpoints.choose import read_model_facts
from minivllm.errors import MinivllmError, ModelError
from minivllm.worker.worker import Worker
from tests.end_to_end.test_bad_input import assert_is_a_sentence
from tests.parity_reference import tiny_llm
from tests.transformers_models.families import FAMILIES, SHAPE

TinyModel = Callable[..., Path]
IMPLEMENTATIONS = ("minivllm", "transformers")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {**ROPE, "rope_type": "longrope"}

NUMBERS: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (0, -1, 2.5, 10**9),
    "hidden_size": (0, -64, 10**12),
    "vocab_size": (0, -5, 10**12),
    "max_position_embeddings": (0, -1),
    "num_attention_heads": (0, -4, "four"),
    "num_key_value_heads": (0, -2, "two", 3),
    "head_dim": (0, -16),
    "intermediate_size": (0, -96),
    "rms_norm_eps": (0.0, -1e-6, "small"),
    "hidden_act": ("relu7",),
}
ROTARY: dict[str, Any] = {
    "an unknown type": ({**ROPE, "rope_type": "nope"}, "nope"),
    "no values": ([1], "rope"),
    "a base of 0": ({**ROPE, "rope_theta": 0}, "rope_theta"),
    "a base in words": ({**ROPE, "rope_theta": "x"}, "rope_theta"),
    "no factor": ({**ROPE, "rope_type": "linear"}, "factor"),
    "a negative factor": ({**ROPE, "rope_type": "yarn", "factor": -2.0}, "factor"),
    "llama3 without its factors": ({**ROPE, "rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    "longrope of another width": ({**LONGROPE, "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
}
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "a window of 0": ({"sliding_window": 0}, "sliding_window"),
    "a negative window": ({"sliding_window": -8}, "sliding_window"),
    "a window in words": ({"sliding_window": "x"}, "sliding_window"),
    "part of a window": ({"sliding_window": 2.5}, "sliding_window"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "layer_types"),
    "no kinds": ({"layer_types": []}, "layer_types"),
    "a kind that is none": ({"layer_types": ["full_attention", "nope", "sliding_attention"]}, "layer_types"),
    "kinds without a window": ({"sliding_window": None}, "sliding_window"),
    "kinds in one word": ({"layer_types": "full_attention"}, "layer_types"),
    "kinds as numbers": ({"layer_types": [1, 2, 3]}, "layer_types"),
}


def changed(model: Path, directory: Path, **entries: Any) -> Path:
    """A directory with nothing but the model's configuration, in which some entries are others."""
    directory.mkdir(exist_ok=True)
    config = {**json.loads((model / "config.json").read_text()), **entries}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(directory: Path, implementation: str) -> MinivllmError:
    with pytest.raises(ModelError) as caught:
        read_model_facts(directory, wanted=implementation)
    return caught.value


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values]
)
def test_sizes_that_no_model_has(
    tiny_model: TinyModel, tmp_path: Path, implementation: str, name: str, value: Any
) -> None:
    error = refusal(changed(tiny_model("llama"), tmp_path, **{name: value}), implementation)
    assert_is_a_sentence(error, "config.json", name, str(value))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_parameters_that_are_missing_or_unknown(
    tiny_model: TinyModel, tmp_path: Path, implementation: str, case: str
) -> None:
    given, named = ROTARY[case]
    error = refusal(changed(tiny_model("llama"), tmp_path, rope_parameters=given), implementation)
    assert_is_a_sentence(error, "config.json", named)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rotary_parameters_of_one_kind_of_layers(
    tiny_model: TinyModel, tmp_path: Path, implementation: str
) -> None:
    by_kind = {"full_attention": {**ROPE, "rope_type": "nope"}, "sliding_attention": ROPE}
    error = refusal(changed(tiny_model("gemma3"), tmp_path, rope_parameters=by_kind), implementation)
    assert_is_a_sentence(error, "config.json", "rope_type is 'nope'")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("family", ["qwen2-window", "gemma2", "gpt-oss"])
def test_windows_and_kinds_of_layers_that_do_not_fit(
    tiny_model: TinyModel, tmp_path: Path, family: str, implementation: str, case: str
) -> None:
    entries, named = LAYERS[case]
    error = refusal(changed(tiny_model(family), tmp_path, **entries), implementation)
    assert_is_a_sentence(error, "config.json", named)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_that_no_layer_needs_may_be_0_or_missing(
    tiny_model: TinyModel, tmp_path: Path, implementation: str
) -> None:
    kinds = {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    for window in (0, None):
        directory = changed(tiny_model("qwen2"), tmp_path, sliding_window=window, **kinds)
        assert read_model_facts(directory, wanted=implementation).num_layers == 3


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"attention_chunk_size": -8}, "attention_chunk_size is -8"),
        ({"layer_types": ["chunked_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention", "nope", "full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but must divide num_attention_heads 4"),
    ],
)
def test_chunks_that_do_not_fit(tmp_path: Path, entries: dict[str, Any], named: str) -> None:
    config = {"model_type": "llama4_text", **SHAPE, **FAMILIES["llama4_text"][0], **entries}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_is_a_sentence(refusal(tmp_path, "transformers"), "config.json", named)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("family", "weights", "named"),
    [
        ("llama", "qwen3", "model.layers.0.self_attn"),
        ("llama", "phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("qwen2-window", "gemma2", "model.layers.0."),
        ("llama", "llama-mqa", "has shape [16, 64]"),
        ("llama", "llama-head-dim", "has shape [64, 64]"),
    ],
)
def test_weights_of_another_architecture(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    weights: str,
    named: str,
    implementation: str,
) -> None:
    directory = changed(tiny_model(family), tmp_path)
    shutil.copy(tiny_model(weights) / "model.safetensors", directory)
    sized: list[Worker] = []
    monkeypatch.setattr(Worker, "size_cache", sized.append)
    with pytest.raises(ModelError) as caught:
        tiny_llm(directory, model_impl=implementation)
    assert_is_a_sentence(caught.value, "model.safetensors", named)
    assert not sized, "memory was taken for a cache"
