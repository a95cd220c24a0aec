"""Experts in checkpoints of every form, and what is refused before memory is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import build_decoder_config, read_decoder_config
from minivllm.errors import ModelError
from minivllm.linear.stored_weight import GroupedWeight
from minivllm.models.layer_specs import MoeSpec

TinyModel = Callable[..., Path]
PREFIX = "model.layers.0.mlp.experts."


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A model with other tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def stack(tensors: dict[str, torch.Tensor]) -> None:
    """One tensor for all experts of a layer, as transformers 5 has them in memory."""
    for layer in range(8):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}0.down_proj.weight" not in tensors:
            continue
        count = sum(name.startswith(prefix) for name in tensors) // 3
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]


def load(path: Path) -> dict[str, Any]:
    weights = iterate_weights(path, "auto", read_decoder_config(path), torch.float32)
    return {name: tensor.clone() for name, tensor in weights if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-plain"])
def test_stacked_experts_are_the_same_as_single_ones(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    path = tiny_model(family)
    single, stacked = load(path), load(copied(path, tmp_path / "stacked", stack))
    assert set(single) == set(stacked)
    assert any(".experts." in name for name in single)
    assert all(torch.equal(single[name], stacked[name]) for name in single)


def without_one_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{PREFIX}3.up_proj.weight"]


def with_one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}8.up_proj.weight"] = tensors[f"{PREFIX}7.up_proj.weight"].clone()


def stacked_with_too_few(tensors: dict[str, torch.Tensor]) -> None:
    stack(tensors)
    tensors[f"{PREFIX}down_proj"] = tensors[f"{PREFIX}down_proj"][:-1].clone()


def stacked_and_single(tensors: dict[str, torch.Tensor]) -> None:
    single = tensors[f"{PREFIX}2.down_proj.weight"].clone()
    stack(tensors)
    tensors[f"{PREFIX}2.down_proj.weight"] = single


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one_expert, r"lacks tensor 'model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight'"),
        (with_one_more, r"experts\.8\.up_proj\.weight', which the model's configuration does not call for"),
        (stacked_with_too_few, r"has shape \[7, 64, 32\], but 8 experts of this configuration make \[8, 64, 32\]"),
        (stacked_and_single, r"experts\.2\.down_proj\.weight', which is also in another"),
    ],
)
def test_files_with_other_experts_are_refused_in_a_sentence(
    tiny_model: TinyModel, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = copied(tiny_model("qwen3-moe"), tmp_path / "broken", change)
    with pytest.raises(ModelError, match=message):
        next(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, but there are only 8 experts \(num_experts\)"),
        ({"num_experts": 0}, "num_experts is 0, but must be a whole number"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok is -1, but must be a whole number"),
        ({"moe_intermediate_size": "many"}, "moe_intermediate_size is 'many', but must be a whole number"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\], but must list numbers of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, but must be a whole number"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', but must be true or false"),
    ],
)
def test_impossible_experts_are_refused_in_a_sentence(
    tiny_model: TinyModel, entries: dict[str, Any], message: str
) -> None:
    given = json.loads((tiny_model("qwen3-moe") / "config.json").read_text())
    given.setdefault("num_experts", given.pop("num_local_experts", 8))
    with pytest.raises(ModelError, match=message):
        build_decoder_config({**given, **entries}, {}, "config.json")


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """As published converters write a Qwen3-MoE: the experts of a layer stacked, in one type."""
    config, weights = read_decoder_config(source), load(source)
    mixer, mlp = config.layers[0].mixer, config.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    writer: Any = gguf.GGUFWriter(target, "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(96)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(mixer.heads)
    writer.add_head_count_kv(mixer.kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rotary[0].theta)
    writer.add_expert_count(mlp.num_experts)
    writer.add_expert_used_count(mlp.routing.top_k)
    writer.add_expert_feed_forward_length(mlp.inner)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_layers)
    for name, tensor in weights.items():
        stored, data, number = names.get_name(name, try_suffixes=(".weight",)), tensor, gguf.GGMLQuantizationType.F32
        if ".experts." in name:
            if ".experts.0." not in name:
                continue
            data = torch.stack([weights[name.replace("experts.0", f"experts.{e}")] for e in range(mlp.num_experts)])
            part = name.split(".")[-2].removesuffix("_proj")
            stored, number = f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", gguf.GGMLQuantizationType[kind]
        writer.add_tensor(stored, gguf.quants.quantize(data.numpy(), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_experts_of_a_gguf_file_keep_their_blocks(tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    source = tiny_model("qwen3-moe", mlp_only_layers=[])
    path = tmp_path / "model.gguf"
    write_gguf(source, path, kind)
    config, original = read_decoder_config(path), read_decoder_config(source)
    assert [layer.mlp for layer in config.layers] == [layer.mlp for layer in original.layers]
    expected = load(source)
    kept = dict(iterate_weights(path, "auto", config, torch.float32, kept_bits=frozenset({4, 8})))
    assert set(kept) == set(expected)
    for name, weight in kept.items():
        if ".experts." in name and kind != "F32":
            assert isinstance(weight, GroupedWeight)
            number = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(expected[name].numpy(), number)
            stored = torch.from_numpy(gguf.quants.dequantize(blocks, number))
            torch.testing.assert_close(weight.restore(torch.float32), stored)
        else:
            assert isinstance(weight, torch.Tensor)
            assert torch.equal(weight, expected[name])
