"""Tiny random models of the families that transformers computes, saved as users find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WINDOWED = {"sliding_window": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {**ROPE, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
BOTH_BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT_SHAPE = {**ROUTED, **LATENT, "num_key_value_heads": 4, "head_dim": 8, "rope_parameters": ROPE}
GEMMA4 = {
    **WINDOWED,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
GPT_OSS = {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": ROPE}
LLAMA4 = {**EXPERTS, "attention_chunk_size": 8, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}
TYPES = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, BOTH_BIASES, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gemma2": (
        WINDOWED,
        {**WINDOWED, "attn_logit_softcapping": 5.0},
        {**WINDOWED, "query_pre_attn_scalar": 5},
    ),
    "gemma3_text": (
        WINDOWED,
        {**WINDOWED, "num_hidden_layers": 7},
        {"sliding_window": 5, "layer_types": [*TYPES, TYPES[0]]},
    ),
    "gemma4_text": (
        {**GEMMA4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
        {**GEMMA4, "layer_types": [*TYPES, *TYPES], "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        {**GEMMA4, "layer_types": [*TYPES, *TYPES], "num_hidden_layers": 4, "hidden_size_per_layer_input": 0},
    ),
    "phi3": ({}, WINDOWED, {"partial_rotary_factor": 0.5}),
    "olmo2": ({}, {"attention_bias": True}, {"num_key_value_heads": 4}),
    "olmo3": (WINDOWED, {**WINDOWED, "num_hidden_layers": 5}, {"sliding_window": 3}),
    "glm4": ({}, {"attention_bias": True}, {"partial_rotary_factor": 1.0}),
    "glm4_moe": (
        ROUTED,
        {**ROUTED, "use_qk_norm": True},
        {**ROUTED, "attention_bias": True, "n_shared_experts": 2},
    ),
    "qwen3_moe": (
        {**EXPERTS, "moe_intermediate_size": 16},
        {**EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True},
        {**EXPERTS, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "gpt_oss": (GPT_OSS, {**GPT_OSS, "num_hidden_layers": 4}, {**GPT_OSS, "num_experts_per_tok": 1}),
    "granite": (
        {},
        {
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
        },
        {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2": (
        {**WINDOWED, "logit_scale": 0.25},
        {**WINDOWED, "num_hidden_layers": 5},
        {"sliding_window": 3},
    ),
    "starcoder2": ({}, WINDOWED, {"use_bias": False}),
    "gpt_neox": ({}, {"use_parallel_residual": False}, {"rotary_pct": 0.5}),
    "gpt2": ({}, {"scale_attn_by_inverse_layer_idx": True}, {"tie_word_embeddings": True}),
    "opt": (
        {"ffn_dim": 48},
        {"ffn_dim": 48, "do_layer_norm_before": False},
        {"ffn_dim": 48, "word_embed_proj_dim": 16},
    ),
    "mixtral": (EXPERTS, {**EXPERTS, **WINDOWED}, {**EXPERTS, "num_experts_per_tok": 1}),
    "phimoe": (EXPERTS, {**EXPERTS, "lm_head_bias": True}, {**EXPERTS, "attention_bias": True}),
    "exaone4": (
        WINDOWED,
        {"sliding_window": 5, "sliding_window_pattern": 2},
        {**WINDOWED, "num_hidden_layers": 5},
    ),
    "ministral3": (
        {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}},
        {},
        WINDOWED,
    ),
    "smollm3": ({}, {"no_rope_layer_interval": 2}, {"tie_word_embeddings": True}),
    "deepseek_v3": (
        LATENT_SHAPE,
        {**LATENT_SHAPE, "q_lora_rank": None},
        {**LATENT_SHAPE, "routed_scaling_factor": 1.5},
    ),
    "llama4_text": (
        LLAMA4,
        {**LLAMA4, "use_qk_norm": False},
        {**LLAMA4, "no_rope_layers": [1, 0, 1], "floor_scale": 4},
    ),
    "arcee": ({}, BOTH_BIASES, {"tie_word_embeddings": True}),
    "seed_oss": ({}, {"attention_bias": False}, {"attention_out_bias": True}),
    "apertus": (
        {"rope_parameters": ROPE},
        {"rope_parameters": ROPE, "attention_bias": True},
        {"rope_parameters": {**ROPE, "rope_theta": 500.0}},
    ),
    "hunyuan_v1_dense": ({}, {"attention_bias": True}, {"num_key_value_heads": 4}),
    "ernie4_5": ({}, {"use_bias": True}, {"tie_word_embeddings": True}),
    "stablelm": ({}, {"use_qkv_bias": True, "qk_layernorm": True}, {"use_parallel_residual": True}),
}
"""model_type -> what three configurations of it differ from SHAPE in."""


def save_model(directory: Path, model_type: str, differences: dict[str, Any], seed: int = 0) -> Path:
    """Write a seeded float32 model as save_pretrained does.
    Norms, biases, sinks and routers are random too."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps({**SHAPE, **differences})))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {
        **dict(model.named_parameters()),
        **{n: b for n, b in model.named_buffers() if n in model.state_dict()},
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(state.items()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1 and name.endswith("weight"):
                tensor.copy_(1.0 + 0.2 * noise)
            elif tensor.dim() == 1:
                tensor.copy_(tensor + 0.3 * noise)
            elif "emb" in name or "wte" in name or "wpe" in name or "lm_head" in name:
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(1.2 * noise / max([1, *tensor.shape[-2:]]) ** 0.5)
    model.save_pretrained(directory)
    return directory
