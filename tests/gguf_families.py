"""GGUF files of families that are stored otherwise than Llama, written from small models as converters do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.models.layer_specs import MoeSpec
from tests.gguf_models import permute, stored_blocks

ARCHITECTURES = {"gemma3_text": "gemma3", "olmo3": "olmo2"}


def write_family_gguf(source: Path, target: Path, matrix_type: str = "F32") -> None:
    """Convert the model in ``source``. matrix_type: GGML type of all matrices; norms and biases stay float32."""
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    architecture = ARCHITECTURES.get(kind, kind)
    writer: Any = gguf.GGUFWriter(target, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kinds = config["layer_types"] if kind == "lfm2" else None
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = read_decoder_config(source).layers[0].mlp.inner if kind == "lfm2" else config["intermediate_size"]
    writer.add_feed_forward_length(inner)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in kinds] if kinds else kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["norm_eps" if kind == "lfm2" else "rms_norm_eps"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind.startswith("gemma") or kind == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) is not None and (kind == "gemma2" or cap.startswith("final")):
            writer.add_float32(f"{architecture}.{cap}", config[cap])
    if kind == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    if kind == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    number = gguf.GGMLQuantizationType[matrix_type]
    for name, data in sorted(load_file(source / "model.safetensors").items()):
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if kind == "granite" and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = permute(data, heads if "q_proj" in name else kv_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind == "lfm2" and name.endswith("conv.conv.weight"):
            writer.add_tensor(stored, data[:, 0])
        elif data.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(data, number), raw_dtype=number)
        else:
            writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


EXPERT_ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
}
_STORED_NAMES = (
    (".sinks", ".sinks.weight"),
    ("e_score_correction_bias", "e_score_correction.bias"),
    ("mlp.shared_expert.", "mlp.shared_experts."),
)


def write_expert_gguf(
    source: Path, target: Path, kind: str = "F32", num_drafting: int = 0, gating: int = 2
) -> dict[str, torch.Tensor]:
    """Convert a model with experts as published converters do: those of a layer stacked, gates and ups apart.

    kind: GGML type of the experts' matrices. num_drafting: layers behind the last one, of tensors that no decoder
    needs. gating: llama.cpp's number of what the router does with its logits, 2 for sigmoids. Returns the weights that
    the file holds, by their names in the decoder.
    """
    config, given = read_decoder_config(source), json.loads((source / "config.json").read_text())
    weights = {name: w.clone() for name, w in iterate_weights(source, "auto", config, torch.float32)}  # type: ignore[union-attr]
    architecture, mixer = EXPERT_ARCHITECTURES[given["model_type"]], config.layers[0].mixer
    [spec, *_] = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoeSpec)]
    writer: Any = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(given["intermediate_size"])
    writer.add_block_count(config.num_layers + num_drafting)
    writer.add_head_count(mixer.heads)
    writer.add_head_count_kv(mixer.kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rotary[0].theta)
    writer.add_rope_dimension_count(config.rotary[0].dim)
    writer.add_expert_count(spec.num_experts)
    writer.add_expert_used_count(spec.routing.top_k)
    writer.add_expert_feed_forward_length(spec.inner)
    if architecture == "gpt-oss":
        writer.add_sliding_window(given["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rotary[0].factor)
        writer.add_rope_scaling_orig_ctx_len(config.rotary[0].original_max_position)
    if architecture == "qwen2moe":
        assert spec.shared is not None
        writer.add_expert_shared_feed_forward_length(spec.shared.inner)
    if architecture == "glm4moe":
        writer.add_expert_shared_count(given["n_shared_experts"])
        writer.add_leading_dense_block_count(given["first_k_dense_replace"])
        writer.add_expert_weights_scale(spec.routing.scale)
        writer.add_expert_weights_norm(spec.routing.normalized)
        writer.add_expert_group_count(spec.routing.groups)
        writer.add_expert_group_used_count(spec.routing.groups_kept)
        writer.add_uint32(gguf.Keys.LLM.EXPERT_GATING_FUNC.format(arch=architecture), gating)
        writer.add_nextn_predict_layers(num_drafting)
        for layer in range(config.num_layers, config.num_layers + num_drafting):
            writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
            writer.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((64, 64), np.float32))
    enumerated = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enumerated, config.num_layers)
    for name, tensor in list(weights.items()):
        data = tensor.numpy()
        if ".experts." in name:
            _, _, layer, _, _, expert, part, suffix = name.split(".")
            if expert != "0":
                continue
            every = [name.replace("experts.0", f"experts.{expert}") for expert in range(spec.num_experts)]
            data = np.stack([weights[own].numpy() for own in every])
            stored = f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{suffix}"
            number = gguf.GGMLQuantizationType[kind if suffix == "weight" else "F32"]
            blocks = stored_blocks(name, data.reshape(-1, data.shape[-1]), number.name).reshape(*data.shape[:-1], -1)
            values = gguf.quants.dequantize(blocks, number).reshape(data.shape)
            weights.update({own: torch.from_numpy(each.copy()) for own, each in zip(every, values, strict=True)})
            writer.add_tensor(stored, blocks, raw_dtype=number)
            continue
        if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = permute(data, mixer.heads if "q_proj" in name else mixer.kv_heads)
        known = name
        for own, other in _STORED_NAMES:
            if own != "mlp.shared_expert." or architecture == "glm4moe":
                known = known.replace(own, other)
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
