"""AWQ, GPTQ and fp8 checkpoints, packed here by hand from known numbers,
read back as exactly those numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ConfigError, ModelError
from minivllm.weights.quantization_config import read_quantization
from minivllm.weights.stored_weight import GroupedWeight, QuantizedWeight, RestoredWeight, RowScaledWeight
from tests.parity_reference import engine_logits, random_prompts, reference_logits, tiny_llm

TinyModel = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
GROUP = 32


def words(numbers: list[np.ndarray]) -> torch.Tensor:
    """Eight arrays of 4-bit numbers, or four of 8 bits, as one of int32, the first in the lowest bits."""
    word = np.zeros(numbers[0].shape, dtype=np.uint32)
    for place, each in enumerate(numbers):
        word |= each.astype(np.uint32) << np.uint32(32 // len(numbers) * place)
    return torch.from_numpy(word.view(np.int32).copy())


def pack_awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensors:
    """codes [in, out], zeros and scales [groups, out];
    nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words([codes[:, first::8] for first in order]),
        "qzeros": words([zeros[:, first::8] for first in order]),
        "scales": torch.from_numpy(scales.astype(np.float16)),
    }


def pack_gptq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, less: int, g_idx: np.ndarray | None
) -> Tensors:
    """Words along the inputs for codes, along the outputs for zeros, which are stored ``less`` one."""
    count = 32 // bits
    packed = {
        "qweight": words([codes[first::count] for first in range(count)]),
        "qzeros": words([(zeros[:, first::count] - less) & (2**bits - 1) for first in range(count)]),
        "scales": torch.from_numpy(scales.astype(np.float16)),
    }
    return packed if g_idx is None else {**packed, "g_idx": torch.from_numpy(g_idx.astype(np.int32))}


def quantised_copy(
    source: Path, target: Path, method: str, settings: dict[str, Any]
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """(quantised checkpoint, the same dequantised, the dequantised weights):
    every linear layer has random codes."""
    random = np.random.default_rng(0)
    weights, stored = load_file(source / "model.safetensors"), {}
    for name in list(weights):
        rules = settings.get("dynamic", {}).items()
        rule, changes = next(
            ((r, c) for r, c in rules if re.match(r[2:], name.removesuffix(".weight"))), ("+:", {})
        )
        if not name.endswith("_proj.weight") or rule.startswith("-:"):
            stored[name] = weights[name]
            continue
        out, inner = weights[name].shape
        bits = {**settings, **changes}.get("bits", 4)
        codes, group_of = random.integers(0, 2**bits, (inner, out)), np.arange(inner) // GROUP
        zeros = random.integers(0, 2**bits, (inner // GROUP, out))
        scales = (random.uniform(0.01, 0.05, zeros.shape) * 16 / 2**bits).astype(np.float16)
        if settings.get("desc_act"):
            # q, k and v share their inputs and with them the order
            np.random.default_rng(inner).shuffle(group_of)
        if settings.get("ragged"):
            group_of[GROUP] = 0
        if method == "awq":
            parts = pack_awq(codes, zeros, scales)
        else:
            less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            parts = pack_gptq(
                codes, zeros, scales, bits, less, None if settings.get("no_g_idx") else group_of
            )
            if name.removesuffix("weight") + "bias" not in weights:
                stored[name.removesuffix("weight") + "bias"] = torch.zeros(out, dtype=torch.float16)
        values = (codes - zeros[group_of]) * scales.astype(np.float64)[group_of]
        weights[name] = torch.from_numpy(values.T.astype(np.float32).copy())
        stored.update({name.removesuffix("weight") + part: tensor for part, tensor in parts.items()})
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP, **settings}
    return *write(source, target, stored, weights, quantization), weights


def write(
    source: Path, target: Path, stored: Tensors, weights: Tensors, quantization: dict[str, Any]
) -> tuple[Path, Path]:
    for name, tensors in (("quantised", stored), ("reference", weights)):
        shutil.copytree(source, target / name)
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, target / name / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (target / "quantised" / "config.json").write_text(json.dumps(config))
    return target / "quantised", target / "reference"


def float8_copy(source: Path, target: Path, kind: str) -> tuple[Path, Path, Tensors]:
    weights, stored = load_file(source / "model.safetensors"), {}
    block = [32, 48]
    generator = torch.Generator().manual_seed(0)
    for name in list(weights):
        if not name.endswith("_proj.weight") or "layers.2.mlp.down_proj" in name:
            stored[name] = weights[name]
            continue
        out, inner = weights[name].shape
        values = (weights[name] * 20).to(torch.float8_e4m3fn)
        module = name.removesuffix("weight")
        if kind == "block":
            scale = torch.rand(-(-out // block[0]), -(-inner // block[1]), generator=generator) / 10
            every = scale.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :inner]
            stored[module + "weight_scale_inv"] = scale
        else:
            scale = torch.rand((out, 1) if kind == "row" else (), generator=generator) / 10
            every = scale.expand(out, inner)
            stored[module + "weight_scale"] = scale
            stored[module + "input_scale"] = torch.tensor(1.0)
        stored[name], weights[name] = values, values.float() * every
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if kind == "block":
        settings["weight_block_size"] = block
    return *write(source, target, stored, weights, settings), weights


def loaded(path: Path) -> dict[str, Any]:
    return dict(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


PACKED = [
    pytest.param("awq", {}, GroupedWeight, id="awq"),
    pytest.param("gptq", {}, GroupedWeight, id="gptq"),
    pytest.param("gptq", {"no_g_idx": True}, GroupedWeight, id="gptq without g_idx"),
    pytest.param("gptq", {"checkpoint_format": "gptq_v2"}, GroupedWeight, id="gptq v2"),
    pytest.param("gptq", {"desc_act": True}, GroupedWeight, id="gptq by activation"),
    pytest.param("gptq", {"ragged": True}, RestoredWeight, id="gptq with groups of different sizes"),
    pytest.param("gptq", {"bits": 8}, GroupedWeight, id="gptq 8 bits"),
    pytest.param("gptq", {"bits": 8, "desc_act": True}, GroupedWeight, id="gptq 8 bits by activation"),
]


@pytest.mark.parametrize(("method", "settings", "kind"), PACKED)
def test_packed_codes_are_unpacked_to_their_values(
    tiny_model: TinyModel, tmp_path: Path, method: str, settings: dict[str, Any], kind: type[QuantizedWeight]
) -> None:
    path, _, values = quantised_copy(tiny_model("llama"), tmp_path, method, settings)
    weights = loaded(path)
    assert set(weights) == set(values)
    for name, expected in values.items():
        weight = weights[name]
        if name.endswith("_proj.weight"):
            assert type(weight) is kind
            weight = weight.restore(torch.float32)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("method", "settings", "kind"), PACKED)
def test_an_engine_multiplies_packed_weights_as_transformers_multiplies_their_values(
    tiny_model: TinyModel, tmp_path: Path, method: str, settings: dict[str, Any], kind: type
) -> None:
    path, reference, _ = quantised_copy(tiny_model("qwen2"), tmp_path, method, settings)
    assert_same_logits(path, reference)


def test_rules_of_gptq_change_single_layers_and_the_first_that_means_one_counts(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    rules = {r"+:.*\.1\.mlp\..*": {"bits": 8}, r"-:.*\.(?:1|2)\.(?:mlp|self_attn)\..*_proj.*": {}}
    path, reference, values = quantised_copy(tiny_model("qwen2"), tmp_path, "gptq", {"dynamic": rules})
    weights = loaded(path)
    kinds = {name: type(weight) for name, weight in weights.items()}
    assert (
        kinds["model.layers.0.mlp.up_proj.weight"]
        is kinds["model.layers.1.mlp.up_proj.weight"]
        is GroupedWeight
    )
    assert (
        kinds["model.layers.1.self_attn.q_proj.weight"]
        is kinds["model.layers.2.mlp.up_proj.weight"]
        is torch.Tensor
    )
    for name, weight in weights.items():
        got = weight.restore(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(got, values[name], rtol=1e-6, atol=1e-6)
    assert_same_logits(path, reference)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_float8_checkpoints_are_read_with_their_scales(
    tiny_model: TinyModel, tmp_path: Path, kind: str
) -> None:
    path, reference, values = float8_copy(tiny_model("llama"), tmp_path, kind)
    weights = loaded(path)
    first, untouched = (
        weights["model.layers.0.mlp.down_proj.weight"],
        weights["model.layers.2.mlp.down_proj.weight"],
    )
    assert type(first) is (RestoredWeight if kind == "block" else RowScaledWeight)
    assert isinstance(untouched, torch.Tensor)
    for name, weight in weights.items():
        got = weight.restore(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(got, values[name], rtol=1e-6, atol=0)
    assert_same_logits(path, reference)


@pytest.mark.slow
def test_inputs_in_another_order_are_compiled_as_well(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, reference, _ = quantised_copy(tiny_model("qwen2"), tmp_path, "gptq", {"desc_act": True})
    assert_same_logits(path, reference, enforce_eager=False)


def assert_same_logits(path: Path, reference: Path, **settings: Any) -> None:
    with tiny_llm(path, **settings) as llm:
        for prompt in random_prompts((2, 62)):
            completion, logits = engine_logits(llm, prompt, max_tokens=3)
            expected = reference_logits(reference, prompt + completion[:-1])
            assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_a_flag_that_contradicts_the_checkpoint_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, _, _ = quantised_copy(tiny_model("llama"), tmp_path, "awq", {})
    with pytest.raises(
        ConfigError, match=r"'int4', but the checkpoint is quantised with awq already: leave quant"
    ):
        tiny_llm(path, quantization="int4")


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("qweight", "missing"),
        ("qzeros", "missing"),
        ("scales", "missing"),
        ("qweight", "misshapen"),
        ("qzeros", "misshapen"),
        ("scales", "misshapen"),
        ("g_idx", "misshapen"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(
    tiny_model: TinyModel, tmp_path: Path, part: str, damage: str
) -> None:
    path, _, _ = quantised_copy(tiny_model("llama"), tmp_path, "gptq", {})
    stored = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensor = stored.pop(name)
    if damage == "misshapen":
        stored[name] = tensor[:-1].contiguous()
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(path)


def test_a_bias_that_the_model_does_not_have_must_be_zero(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, _, _ = quantised_copy(tiny_model("llama"), tmp_path, "gptq", {})
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.bias' is not zero"):
        loaded(path)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"config\.json.*'bitsandbytes'.*supported are awq with 4 bits, gptq .* fp8,",
        ),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported, only with 4 or 8"),
        ({"quant_method": "gptq", "bits": 2}, "gptq with 2 bits is not supported, only with 4 or 8"),
        ({"quant_method": "gptq", "bits": True}, "gptq with True bits is not supported"),
        ({"quant_method": "awq", "bits": 8}, "awq with 8 bits is not supported, only with 4:"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported, only 'gemm'"),
        ({"quant_method": "awq", "group_size": "x"}, "group_size is 'x'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ("awq", "must be an object"),
    ],
)
def test_an_unsupported_quantisation_is_refused_with_what_is_supported(entry: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_quantization(entry, "config.json")


def test_an_unquantised_configuration_names_no_quantisation() -> None:
    assert read_quantization(None, "config.json") is None
