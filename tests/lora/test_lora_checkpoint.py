"""Adapters that cannot be served are refused with a sentence; those that can are read as PEFT means them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.errors import RequestError
from minivllm.lora.checkpoint import Adapter, load_adapter
from tests.lora.lora_adapters import TinyModel, linear_shapes, random_matrices, write_adapter

Matrices = dict[str, Tensor]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def load(model: Path, directory: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> Adapter:
    return load_adapter(str(directory), linear_shapes(model), max_rank, dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA is served"),
        ({"use_dora": True}, r"use_dora, that is magnitude vectors \(DoRA\), which is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save, that is whole trained modules"),
        ({"bias": "lora_only"}, "bias to 'lora_only', but trained biases are not served"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "init_lora_weights to 'pissa_niter_16', which changes the base",
        ),
        ({"lora_alpha": "16"}, "lora_alpha is '16', but must be a finite number"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf, but must be a finite number"),
        ({"alpha_pattern": {"(q_proj": 3}}, "is not searched for: it is no regular expression"),
        ({"alpha_pattern": [3]}, "alpha_pattern is .3., but must be an object"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(
    tiny_model: TinyModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = tiny_model("llama")
    directory = write_adapter(tmp_path / "adapter", random_matrices(model, 4, ("q_proj",), 0), **options)
    with pytest.raises(RequestError, match=message):
        load(model, directory)


def _with(name: str, tensor: Tensor) -> Callable[[Matrices], Matrices]:
    return lambda matrices: {**matrices, name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {}, "holds no tensors"),
        (
            _with("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 416)),
            "adapters of embeddings",
        ),
        (
            _with("base_model.model.lm_head.lora_A.weight", torch.ones(4, 64)),
            "of the output layer are not served",
        ),
        (_with(f"{Q0}.lora_magnitude_vector.weight", torch.ones(64)), "magnitude vectors .DoRA."),
        (_with("something.else", torch.ones(4)), "'something.else', which is not lora_A or lora_B"),
        (
            _with(Q0.replace("layers.0", "layers.9") + ".lora_A.weight", torch.ones(4, 64)),
            "for another base model",
        ),
        (
            _with(f"{Q0}.lora_A.weight", torch.ones(4, 96)),
            r"shapes \[4, 96\] and \[64, 4\], but the model calls for",
        ),
        (_with(f"{Q0}.lora_A.weight", torch.ones(3, 64)), "for another base model"),
        (_with(f"{Q0}.lora_A.weight", torch.ones(64)), "for another base model"),
        (_with(f"{Q0}.lora_A.weight", torch.ones(4, 64, dtype=torch.int64)), "must be stored as one of F64"),
        (_with(f"{Q0}.lora_A.default.weight", torch.ones(4, 64)), "holds lora_A of .*q_proj twice"),
        (
            lambda m: {k: v for k, v in m.items() if k != f"{Q0}.lora_B.weight"},
            "only one of lora_A and lora_B",
        ),
        (
            _with(f"{Q0}.lora_B.weight", torch.full((64, 4), math.nan)),
            "numbers in .*q_proj that are not finite",
        ),
        (
            _with(f"{Q0}.lora_A.weight", torch.full((4, 64), math.inf)),
            "numbers in .*q_proj that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_refused_by_name(
    tiny_model: TinyModel, tmp_path: Path, change: Callable[[Matrices], Matrices], message: str
) -> None:
    model = tiny_model("llama")
    directory = write_adapter(tmp_path / "adapter", change(random_matrices(model, 4, ("q_proj",), 0)))
    with pytest.raises(RequestError, match=message):
        load(model, directory)


def test_an_adapter_for_another_base_model_or_of_a_larger_rank_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, other = tiny_model("llama"), tiny_model("qwen3")
    directory = write_adapter(tmp_path / "other", random_matrices(other, 4, ("q_proj",), 0))
    with pytest.raises(RequestError, match="it is for another base model"):
        load(model, directory)
    directory = write_adapter(tmp_path / "large", random_matrices(model, 9, ("q_proj",), 0))
    with pytest.raises(
        RequestError, match="has rank 9, but max_lora_rank is 8: start the engine with a larger one"
    ):
        load(model, directory)


def test_numbers_that_the_model_cannot_hold_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """1e5 is beyond float16: as infinity it would turn every row of the batch into NaN."""
    model = tiny_model("llama")
    matrices = {**random_matrices(model, 4, ("q_proj",), 0), f"{Q0}.lora_B.weight": torch.full((64, 4), 1e5)}
    directory = write_adapter(tmp_path / "adapter", matrices, lora_alpha=4)
    assert load(model, directory).rank == 4
    with pytest.raises(RequestError, match=r"not finite in torch\.float16"):
        load(model, directory, dtype=torch.float16)


@pytest.mark.parametrize("broken", ["config", "weights", "truncated", "bin", "missing"])
def test_broken_files_are_refused(tiny_model: TinyModel, tmp_path: Path, broken: str) -> None:
    model = tiny_model("llama")
    directory = write_adapter(tmp_path / "adapter", random_matrices(model, 4, ("q_proj",), 0))
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    expected = {
        "config": "Not an adapter: .* is not valid JSON",
        "weights": "has no adapter_model.safetensors",
        "truncated": "not a valid safetensors file",
        "bin": "adapter_model.bin could run any code and is never opened",
        "missing": "Not an adapter: .*adapter_config.json cannot be read",
    }[broken]
    if broken == "config":
        config.write_text("{")
    elif broken == "missing":
        config.unlink()
    elif broken == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    else:
        weights.unlink()
        if broken == "bin":
            (directory / "adapter_model.bin").touch()
    with pytest.raises(RequestError, match=expected):
        load(model, directory)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
        {"alpha_pattern": {r"self_attn\.v_proj": 5, r"layers\.0\..*\.(q|k)_proj": 3, "q_proj": 20}},
        {"alpha_pattern": {r"^model\.layers\.(0|9)\.(.*)_proj$": 3, "proj": 9}},
        {"alpha_pattern": {r".*\.0(\.\w+)*": 3}},
    ],
)
def test_scaling_is_alpha_over_rank_or_its_root(
    tiny_model: TinyModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = tiny_model("llama")
    matrices = random_matrices(model, 4, ("q_proj",), 0)
    adapter = load(model, write_adapter(tmp_path / "adapter", matrices, lora_alpha=20, **options))
    first, second = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    scale = 20 / 2 if options.get("use_rslora") else 20 / 4
    patterned = 3 / 4 if "alpha_pattern" in options else scale
    for name, factor in ((first, patterned), (second, scale)):
        torch.testing.assert_close(
            adapter.modules[name].b, factor * matrices[f"base_model.model.{name}.lora_B.weight"]
        )
        torch.testing.assert_close(
            adapter.modules[name].a, matrices[f"base_model.model.{name}.lora_A.weight"]
        )


def test_the_digest_names_the_contents(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    matrices = random_matrices(model, 4, ("q_proj",), 0)
    one = write_adapter(tmp_path / "one", matrices)
    two = write_adapter(tmp_path / "two", matrices)
    assert load(model, one).digest == load(model, two).digest
    config = json.loads((two / "adapter_config.json").read_text())
    (two / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 17}))
    assert load(model, one).digest != load(model, two).digest
    write_adapter(two, {name: tensor + 1 for name, tensor in matrices.items()})
    assert load(model, one).digest != load(model, two).digest
