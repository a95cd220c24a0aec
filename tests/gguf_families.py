"""GGUF files of families that are stored otherwise than Llama, written from small models as converters do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.gguf_models import permute

ARCHITECTURES = {"gemma3_text": "gemma3", "olmo3": "olmo2"}


def write_family_gguf(source: Path, target: Path, matrix_type: str = "F32") -> None:
    """Convert the model in ``source``. matrix_type: GGML type of all matrices; norms and biases stay float32."""
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    architecture = ARCHITECTURES.get(kind, kind)
    writer: Any = gguf.GGUFWriter(target, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    number = gguf.GGMLQuantizationType[matrix_type]
    for name, data in sorted(load_file(source / "model.safetensors").items()):
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if kind == "granite" and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = permute(data, heads if "q_proj" in name else kv_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if data.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(data, number), raw_dtype=number)
        else:
            writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
