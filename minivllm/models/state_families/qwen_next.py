"""Qwen3-Next and Qwen3.5: gated delta nets, and every few layers gated attention; norms that multiply by 1 + w."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.entries.entries import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Entries
from minivllm.models.expert_families.experts import experts_from_gguf, layers_from_gguf, with_experts
from minivllm.models.expert_families.qwen import qwen_experts
from minivllm.models.families.dense import Description, dense
from minivllm.models.families.family import Family, defaults, text_part
from minivllm.models.layer_specs import GatedDeltaSpec, LayerSpec, SelfAttentionSpec
from minivllm.models.state_families.gguf_entries import head_dim, layer_kinds
from minivllm.models.state_families.lfm2 import MAX_TAPS


def _types(entries: Entries) -> Sequence[str]:
    """As listed, or every so many layers one of attention."""
    listed = entries.layer_types(("linear_attention", "full_attention"))
    if listed is not None:
        return listed
    interval = entries.whole("full_attention_interval", 1, MAX_LAYERS)
    layers = range(entries.num_layers)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]


def _gated_delta(entries: Entries) -> GatedDeltaSpec:
    heads = entries.whole("linear_num_value_heads", 1, MAX_HEADS)
    key_heads = entries.whole("linear_num_key_heads", 1, MAX_HEADS)
    if heads % key_heads:
        raise entries.refuse("linear_num_key_heads", key_heads, f"must divide linear_num_value_heads {heads}")
    if entries.activation("hidden_act") != "silu":
        raise entries.refuse("hidden_act", entries.get("hidden_act"), "must be silu, which the gates here are made of")
    return GatedDeltaSpec(
        key_heads=key_heads,
        key_dim=entries.whole("linear_key_head_dim", 1, MAX_HEAD_DIM),
        heads=heads,
        value_dim=entries.whole("linear_value_head_dim", 1, MAX_HEAD_DIM),
        taps=entries.whole("linear_conv_kernel_dim", 2, MAX_TAPS),
        norm_eps=entries.norm_eps,
    )


_ATTENTION: Mapping[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": "per head"}


def _describe(entries: Entries) -> Description:
    if entries.get("num_experts"):
        described = with_experts(entries, partial(qwen_experts, has_shared=True), **_ATTENTION)
    else:
        described = dense(entries, **_ATTENTION)
    types = _types(entries)
    if "full_attention" not in types:
        raise entries.refuse("layer_types", types, "must hold full_attention: states lie beside keys and values")
    gated_delta = _gated_delta(entries) if "linear_attention" in types else None

    def mixed(layer: LayerSpec, kind: str) -> LayerSpec:
        if kind == "linear_attention":
            assert gated_delta is not None
            return replace(layer, mixer=gated_delta)
        return replace(layer, mixer=replace(layer.attention, output_gate=True))

    layers = tuple(mixed(layer, kind) for layer, kind in zip(described.layers, types, strict=True))
    return replace(described, layers=layers)


def _by_head(family: Family, config: DecoderConfig) -> Family:
    """Queries and gates of a head lie together, and in Qwen3-Next all that belongs to a key of the gated delta net."""
    groups = {}
    for layer in config.layers:
        if isinstance(layer.mixer, SelfAttentionSpec):
            groups["q_proj"] = layer.mixer.heads
        elif isinstance(layer.mixer, GatedDeltaSpec):
            groups["in_proj_qkvz"] = groups["in_proj_ba"] = layer.mixer.key_heads
    return replace(family, groups=groups)


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of the chosen experts are always normalised in llama.cpp."""
    return {
        "num_experts": 0,
        **experts_from_gguf(metadata),
        "shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "num_hidden_layers": layers_from_gguf(metadata, entries),
        "layer_types": layer_kinds(metadata, "linear_attention"),
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "linear_num_key_heads": metadata.get("ssm.group_count"),
        "linear_num_value_heads": metadata.get("ssm.time_step_rank"),
        "linear_key_head_dim": metadata.get("ssm.state_size"),
        "linear_value_head_dim": head_dim(metadata),
        "linear_conv_kernel_dim": metadata.get("ssm.conv_kernel"),
    }


_FUSED = {
    "q_proj": ("q_proj", "g_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_family = partial(
    Family,
    describe=_describe,
    fused=_FUSED,
    fit=_by_head,
    norm_offset=1.0,
    whole_norms=("linear_attn.norm.weight",),
    has_drafting_layers=True,
    gguf_renamed={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "self_attn.qkv_proj": "linear_attn.in_proj_qkv",
        "mamba.in_proj": "linear_attn.in_proj_qkvz",
        "mamba": "linear_attn",
    },
    from_gguf=_from_gguf,
)
_DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DRAFTS = ("mtp.",)
_QWEN3_NEXT = _family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    gguf_architecture="qwen3next",
    defaults=defaults(
        **_DEFAULTS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
    ),
    left_out=_DRAFTS,
)
_QWEN3_5 = _family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    gguf_architecture="qwen35",
    gguf_tiles_values=True,
    defaults=defaults(
        **{**_DEFAULTS, "num_key_value_heads": 4},
        vocab_size=248320,
        intermediate_size=12288,
    ),
    left_out=_DRAFTS,
)
_QWEN3_5_MOE = _family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    gguf_architecture="qwen35moe",
    gguf_tiles_values=True,
    defaults=defaults(
        **_DEFAULTS,
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=512,
        num_hidden_layers=40,
        num_experts=256,
        num_experts_per_tok=8,
    ),
    left_out=_DRAFTS,
)


def _with_images(family: Family, architecture: str, model_type: str) -> Family:
    """The text part of a checkpoint that also sees images."""
    return replace(
        family,
        architecture=architecture,
        model_type=model_type,
        gguf_architecture=None,  # published as the text part alone
        rewrite_config=text_part,
        prefixes={"model.language_model.": "model."},
        left_out=(*_DRAFTS, "model.visual."),
    )


FAMILIES = (
    _QWEN3_NEXT,
    _QWEN3_5,
    _QWEN3_5_MOE,
    _with_images(_QWEN3_5, "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    _with_images(_QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)
