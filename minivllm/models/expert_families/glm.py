"""GLM-4.5: sigmoid routing with corrected scores, a shared MLP, and some dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.models.entries.entries import MAX_LAYERS, Entries
from minivllm.models.expert_families.experts import (
    MAX_EXPERTS,
    experts_from_gguf,
    experts_of,
    inner_of_experts,
    layers_from_gguf,
    shared_mlp,
    sigmoid_routing,
    with_experts,
)
from minivllm.models.families.dense import Description
from minivllm.models.families.family import Family, defaults
from minivllm.models.layer_specs import MoeSpec

SCORES = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of gating functions."""


def glm_experts(entries: Entries, layer: int) -> MoeSpec | None:
    """Experts behind ``first_k_dense_replace`` dense layers, as GLM-4.5 and DeepSeek-V3 have them."""
    if layer < entries.whole("first_k_dense_replace", 0, MAX_LAYERS):
        return None
    num_experts, top_k = experts_of(entries)
    inner, shared = inner_of_experts(entries), entries.whole("n_shared_experts", 0, MAX_EXPERTS)
    return MoeSpec(
        num_experts=num_experts,
        inner=inner,
        routing=sigmoid_routing(entries, num_experts, top_k),
        activation=entries.activation("hidden_act"),
        has_correction=True,
        shared=shared_mlp(entries, shared * inner) if shared else None,
    )


def _glm4_moe(entries: Entries) -> Description:
    """Heads of q and k have norms in the larger of the two published models."""
    qk_norm = "per head" if entries.flag("use_qk_norm") else None
    return with_experts(entries, glm_experts, qkv_bias="attention_bias", qk_norm=qk_norm)


def routing_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's metadata say of experts behind dense layers."""
    keys = {
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    found = {entry: metadata[key] for entry, key in keys.items() if key in metadata}
    return {**experts_from_gguf(metadata), **found, "num_hidden_layers": layers_from_gguf(metadata, entries)}


def scores_from_gguf(metadata: Mapping[str, Any], default: int) -> str:
    """What a router does with its logits. default: llama.cpp's number where a file has none."""
    number = metadata.get("expert_gating_func") or default
    return SCORES.get(number, "unknown to this decoder") if isinstance(number, int) else "no number"


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**routing_from_gguf(metadata, entries), "scoring_func": scores_from_gguf(metadata, 2)}


FAMILIES = (
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        gguf_architecture="glm4moe",
        defaults=defaults(
            vocab_size=151552,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            moe_intermediate_size=1408,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            use_qk_norm=False,
        ),
        describe=_glm4_moe,
        has_drafting_layers=True,
        gguf_renamed={"post_self_attn_layernorm": "post_attention_layernorm"},
        from_gguf=_from_gguf,
    ),
)
