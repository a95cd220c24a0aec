"""GGUF files of families that are stored otherwise than Llama, written from small models as converters do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.specs.layers import MoeSpec
from tests.gguf_models import permute, stored_blocks, write_all

ARCHITECTURES = {"gemma3_text": "gemma3", "olmo3": "olmo2"}


def write_family_gguf(source: Path, target: Path, matrix_type: str = "F32") -> None:
    """Convert the model in ``source``.
    matrix_type: GGML type of all matrices; norms and biases stay float32."""
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
            writer.add_tensor(
                f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32)
            )
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
    write_all(writer)


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

    kind: GGML type of the experts' matrices. num_drafting: layers behind the last one, of tensors that no
    decoder needs. gating: llama.cpp's number of what the router does with its logits, 2 for sigmoids. Returns
    the weights that the file holds, by their names in the decoder.
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
            blocks = stored_blocks(name, data.reshape(-1, data.shape[-1]), number.name).reshape(
                *data.shape[:-1], -1
            )
            values = gguf.quants.dequantize(blocks, number).reshape(data.shape)
            weights.update(
                {own: torch.from_numpy(each.copy()) for own, each in zip(every, values, strict=True)}
            )
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
    write_all(writer)
    return weights


LATER_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "granitemoehybrid": "granitehybrid",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ministral3": "mistral3",
}


def write_later_gguf(
    source: Path,
    target: Path,
    matrix_type: str = "F32",
    *,
    other_layout: bool = False,
    changes: Mapping[str, object] | None = None,
) -> None:
    """Convert a model with latents, with states or of Ministral 3 as published converters do.

    other_layout: the other one of two that files have: keys and values of latents in one tensor, all that a
    gated delta net reads in one, gates and ups of experts in one. changes: metadata by their names without
    the architecture; None leaves one out.
    """
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    architecture = LATER_ARCHITECTURES[kind]
    writer: Any = gguf.GGUFWriter(target, architecture)
    _write_metadata(writer, kind, config, other_layout)
    for key, value in (changes or {}).items():
        for entries in writer.kv_data:
            entries.pop(f"{architecture}.{key}", None)
        if value is not None:
            writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    enumerated = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enumerated, config["num_hidden_layers"])
    number = gguf.GGMLQuantizationType[matrix_type]
    tensors = _stacked(load_file(source / "model.safetensors"))
    for name, data in _as_stored(kind, config, tensors, other_layout):
        stored = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if data.ndim > 1 and data.shape[-1] % 32 == 0 and "_inp" not in stored:
            blocks = gguf.quants.quantize(np.ascontiguousarray(data), number)
            writer.add_tensor(stored, blocks, raw_dtype=number)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(data))
    write_all(writer)


def _write_metadata(writer: Any, kind: str, config: dict[str, Any], other_layout: bool) -> None:
    heads, rope = config["num_attention_heads"], config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    types = config.get("layer_types") or []
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config["intermediate_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    experts = next(
        (config[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in config), 0
    )
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind.startswith("deepseek"):
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        key_dim, value_dim = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
        writer.add_head_count_kv(heads if other_layout else 1)
        writer.add_key_length(key_dim if other_layout else rank + rope_dim)
        writer.add_value_length(value_dim if other_layout else rank)
        if not other_layout:
            writer.add_key_length_mla(key_dim)
            writer.add_value_length_mla(value_dim)
        writer.add_kv_lora_rank(rank)
        if config["q_lora_rank"] is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_rope_dimension_count(rope_dim)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config.get("norm_topk_prob"):
            writer.add_expert_weights_norm(True)
        if kind == "deepseek_v3" or not other_layout:
            writer.add_uint32("deepseek2.expert_gating_func", 2 if kind == "deepseek_v3" else 1)
        if config.get("n_group"):
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    elif kind == "granitemoehybrid":
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads * (type.removeprefix("full_") == "attention") for type in types])
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind.startswith("qwen"):
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_full_attention_interval(types.index("full_attention") + 1)
        if experts:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the experts of a layer in one tensor each for gates, ups and downs."""
    result: dict[str, np.ndarray] = {}
    for name, data in tensors.items():
        block, _, part = name.partition(".mlp.experts.")
        number, _, rest = part.partition(".")
        if "block_sparse_moe.input_linear" in name:
            block = block.partition(".block_sparse_moe")[0]
            for own, half in zip(("gate_proj", "up_proj"), np.split(data, 2, axis=1), strict=True):
                result[f"{block}.mlp.experts.{own}.weight"] = half
        elif number.isdecimal():
            count = sum(other.startswith(f"{block}.mlp.experts.") for other in tensors) // 3
            if number == "0":
                every = [tensors[f"{block}.mlp.experts.{expert}.{rest}"] for expert in range(count)]
                result[f"{block}.mlp.experts.{rest}"] = np.stack(every)
        else:
            result[name] = data
    return result


def _as_stored(
    kind: str, config: dict[str, Any], tensors: dict[str, np.ndarray], other_layout: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as converters write them, some of them under their final names already."""
    for name, data in sorted(tensors.items()):
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if kind.startswith("qwen"):
            yield from _of_qwen(kind, config, name, data, other_layout, tensors)
        elif name.endswith("kv_b_proj.weight") and not other_layout:
            heads, nope_dim = config["num_attention_heads"], config["qk_nope_head_dim"]
            by_head = data.reshape(heads, -1, data.shape[-1])
            yield name.replace("kv_b", "k_b"), by_head[:, :nope_dim].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), by_head[:, nope_dim:]
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("correction_bias", "correction.bias"), data
        elif name.split(".")[-2] in ("q_proj", "k_proj") and kind in ("ministral3", "granitemoehybrid"):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            yield name, permute(data, config[heads]).reshape(data.shape)
        elif "shared_mlp.input_linear" in name:
            suffix = "_shexp" * bool(config["num_local_experts"])
            for part, half in zip(("gate", "up"), np.split(data, 2), strict=True):
                yield f"blk.{layer}.ffn_{part}{suffix}.weight", half
        elif "shared_mlp.output_linear" in name:
            yield f"blk.{layer}.ffn_down{'_shexp' * bool(config['num_local_experts'])}.weight", data
        elif name.endswith("mamba.A_log"):
            yield name, -np.exp(data)[:, None]
        elif name.endswith("mamba.D"):
            yield name, data[:, None]
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), data
        elif name.endswith("mamba.norm.weight"):
            yield name, data.reshape(config["mamba_n_groups"], -1)
        elif name.endswith("conv1d.weight"):
            yield name, data[:, 0]
        else:
            yield name, data


def _of_qwen(
    kind: str,
    config: dict[str, Any],
    name: str,
    data: np.ndarray,
    other_layout: bool,
    tensors: dict[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys = 2 * key_heads * key_dim
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        data = data + 1
    elif name.endswith("A_log"):
        data = -np.exp(data)
    elif name.endswith("conv1d.weight"):
        data = data[:, 0]
    elif name.endswith("shared_expert_gate.weight"):
        data = data[0]

    def tiled(rows: np.ndarray) -> np.ndarray:
        """The first value of every key, then the second of every key, and so on."""
        return rows.reshape(key_heads, heads // key_heads, -1).swapaxes(0, 1).reshape(rows.shape)

    if kind != "qwen3_next" and "linear_attn" in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            data = np.concatenate([data[:keys], tiled(data[keys:])])
        elif "out_proj" in name:
            data = tiled(data.T).T
        elif not name.endswith("norm.weight"):
            data = tiled(data)
    if "in_proj_qkvz" in name and not other_layout:
        shared = heads // key_heads * value_dim
        of_keys = data.reshape(key_heads, -1, data.shape[-1])
        cuts = np.split(of_keys, np.cumsum([key_dim, key_dim, shared]), axis=1)
        q, k, v, z = (cut.reshape(-1, data.shape[-1]) for cut in cuts)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"blk.{layer}.attn_gate.weight", z
    elif other_layout and ".experts.gate_proj" in name:
        whole = np.concatenate([data, tensors[name.replace("gate", "up")]], axis=1)
        yield f"blk.{layer}.ffn_gate_up_exps.weight", whole
    elif not (other_layout and ".experts.up_proj" in name):
        yield name.replace("dt_bias", "dt_proj.bias"), data


def write_gemma4_gguf(
    source: Path, target: Path, matrix_type: str = "F32", unused_keys: bool = False
) -> None:
    """Convert a Gemma 4 as published converters do. unused_keys: layers that read keys and values of others
    have weights for their own all the same."""
    config = json.loads((source / "config.json").read_text())
    described = read_decoder_config(source)
    is_windowed = [layer.attention.attend.window is not None for layer in described.layers]
    full = described.layers[is_windowed.index(False)].attention
    writer: Any = gguf.GGUFWriter(target, "gemma4")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    mlps = [getattr(layer.mlp, "beside", None) or layer.mlp for layer in described.layers]
    inner = [mlp.inner for mlp in mlps]
    writer.add_feed_forward_length(inner if config["use_double_wide_mlp"] else inner[0])
    kv_heads = [layer.attention.kv_heads for layer in described.layers]
    writer.add_head_count_kv(kv_heads if config["attention_k_eq_v"] else kv_heads[0])
    writer.add_key_length(full.head_dim)
    writer.add_key_length_swa(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(full.head_dim)
    turned = int(full.head_dim * rope["full_attention"]["partial_rotary_factor"]) // 2
    writer.add_tensor(
        "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (full.head_dim // 2 - turned), np.float32)
    )
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config["num_hidden_layers"])
    number = gguf.GGMLQuantizationType[matrix_type]
    tensors = load_file(source / "model.safetensors")
    for index, layer in enumerate(described.layers):
        if unused_keys and layer.shares_cache_of is not None:
            for part in ("k_proj", "v_proj"):
                read = tensors[f"model.layers.{layer.shares_cache_of}.self_attn.{part}.weight"]
                tensors[f"model.layers.{index}.self_attn.{part}.weight"] = read
    for name, data in tensors.items():
        scale = {".router.scale": "ffn_gate_inp", ".router.per_expert_scale": "ffn_down_exps"}
        end = next((end for end in scale if name.endswith(end)), None)
        if end is not None:
            stored: str | None = f"blk.{name.split('.')[2]}.{scale[end]}.scale"
        else:
            name = name if name.endswith(".weight") else f"{name}.weight"
            stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if data.ndim > 1 and data.shape[-1] % 32 == 0 and "ffn_gate_inp" not in stored:
            writer.add_tensor(stored, gguf.quants.quantize(data, number), raw_dtype=number)
        else:
            writer.add_tensor(stored, data)
    write_all(writer)
