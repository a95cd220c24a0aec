"""Granite: Llama with four multipliers;
Granite 4 H: Mamba2 layers, a few layers of attention, and a shared MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.families.dense import Description, dense
from minivllm.families.entries import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, MAX_WIDTH, Entries
from minivllm.families.experts import MAX_EXPERTS, experts_of
from minivllm.families.family import Family, defaults
from minivllm.families.gguf_entries import head_dim, layer_kinds
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import FeedForwardSpec, Mamba2Spec, MlpSpec, MoeSpec

MULTIPLIERS: Mapping[str, float] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_layers = partial(dense, qkv_bias="attention_bias", o_bias="attention_bias", reads_mlp_bias=True)


def _describe_granite(entries: Entries) -> Description:
    return folded(entries, _layers(entries))


def folded(entries: Entries, described: Description) -> Description:
    """The same with the multipliers. Every sublayer adds m times its output. Divide the whole residual stream
    by m instead: norms divide by its length, so nothing can tell the difference but their epsilon, which is
    compared with a square, and the embeddings.
    """
    residual = entries.number("residual_multiplier")
    described = described.attending(scale=entries.number("attention_multiplier"))
    eps = described.norm_eps / residual**2
    return replace(
        described,
        norm_eps=eps,
        layers=tuple(replace(layer, norms=replace(layer.norms, eps=eps)) for layer in described.layers),
        embedding_scale=entries.number("embedding_multiplier") / residual,
        logits_scale=1 / entries.number("logits_scaling"),
    )


def multipliers_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {entry: metadata[key] for entry, key in keys.items() if key in metadata}


_GRANITE_FAMILIES = (
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        gguf_architecture="granite",
        defaults=defaults(
            **MULTIPLIERS,
            vocab_size=32000,
            intermediate_size=11008,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=_describe_granite,
        gguf_permutes_rotary=True,
        from_gguf=multipliers_from_gguf,
    ),
)


_NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_STATE_KINDS, _ATTENTION_KINDS = ("mamba", "linear_attention"), ("attention", "full_attention")


def _tables(entries: Entries) -> Sequence[int | None]:
    kind = entries.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise entries.refuse("position_embedding_type", kind, "must be rope, nope or null")
    return (0 if kind == "rope" else None,) * entries.num_layers


_attention = partial(dense, qkv_bias="attention_bias", o_bias="attention_bias", tables=_tables)


def _mamba2(entries: Entries) -> Mamba2Spec:
    heads, groups = (entries.whole(f"mamba_n_{part}", 1, MAX_HEADS) for part in ("heads", "groups"))
    inner = entries.whole("mamba_expand", 1, 64) * entries.whole("hidden_size", 1, MAX_WIDTH)
    head_dim = (
        inner // heads
        if entries.get("mamba_d_head") == "auto"
        else entries.whole("mamba_d_head", 1, MAX_WIDTH)
    )
    if heads * head_dim != inner:
        raise entries.refuse("mamba_n_heads", heads, f"times mamba_d_head {head_dim} must be {inner}")
    if heads % groups:
        raise entries.refuse("mamba_n_groups", groups, f"must divide mamba_n_heads {heads}")
    if entries.activation("hidden_act") != "silu":
        raise entries.refuse(
            "hidden_act", entries.get("hidden_act"), "must be silu, which the gates here are made of"
        )
    limits = entries.get("time_step_limit")
    if limits not in _NO_LIMITS:
        raise entries.refuse(
            "time_step_limit", limits, "must be [0, Infinity]: steps of the state are not clamped"
        )
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=entries.whole("mamba_d_state", 1, MAX_HEAD_DIM),
        taps=entries.whole("mamba_d_conv", 2, MAX_TAPS),
        norm_eps=entries.norm_eps,
        conv_bias=entries.flag("mamba_conv_bias"),
        bias=entries.flag("mamba_proj_bias"),
    )


def _feed_forward(entries: Entries) -> FeedForwardSpec:
    activation = entries.activation("hidden_act")
    shared = MlpSpec(inner=entries.whole("shared_intermediate_size", 1, MAX_WIDTH), activation=activation)
    if entries.whole("num_local_experts", 0, MAX_EXPERTS) == 0:
        return shared
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=activation,
        shared=shared,
    )


def _describe_hybrid(entries: Entries) -> Description:
    described, mamba2, mlp = folded(entries, _attention(entries)), _mamba2(entries), _feed_forward(entries)
    types = entries.layer_types((*_STATE_KINDS, *_ATTENTION_KINDS)) or ["mamba"] * entries.num_layers
    if not any(kind in _ATTENTION_KINDS for kind in types):
        raise entries.refuse("layer_types", types, "must hold attention: states lie beside keys and values")
    layers = tuple(
        replace(layer, mixer=mamba2 if kind in _STATE_KINDS else layer.mixer, mlp=mlp)
        for layer, kind in zip(described.layers, types, strict=True)
    )
    return replace(described, layers=layers)


def _named_hybrid(family: Family, config: DecoderConfig) -> Family:
    """The MLP stands beside the experts, or in their place."""
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in config.layers)
    shared = "mlp.shared_expert" if has_experts else "mlp"
    return replace(family, renamed={**family.renamed, "shared_mlp": shared})


def _hybrid_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without experts the shared MLP is the only one; llama.cpp then reads its width from another key."""
    inner, hidden = metadata.get("ssm.inner_size"), entries["hidden_size"]
    expand = inner // hidden if isinstance(inner, int) and isinstance(hidden, int) and hidden > 0 else None
    return {
        **multipliers_from_gguf(metadata, entries),
        "layer_types": layer_kinds(metadata, "mamba"),
        "num_local_experts": metadata.get("expert_count", 0),
        "num_experts_per_tok": metadata.get("expert_used_count"),
        "shared_intermediate_size": metadata.get(
            "expert_shared_feed_forward_length", entries.get("intermediate_size")
        ),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else "nope",
        "mamba_n_heads": metadata.get("ssm.time_step_rank"),
        "mamba_d_head": head_dim(metadata),
        "mamba_expand": expand,
        "mamba_n_groups": metadata.get("ssm.group_count"),
        "mamba_d_state": metadata.get("ssm.state_size"),
        "mamba_d_conv": metadata.get("ssm.conv_kernel"),
    }


_GRANITE_HYBRID_FAMILIES = (
    Family(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        gguf_architecture="granitehybrid",
        defaults=defaults(
            **MULTIPLIERS,
            vocab_size=32000,
            intermediate_size=11008,
            shared_intermediate_size=1024,
            max_position_embeddings=2048,
            num_local_experts=8,
            num_experts_per_tok=2,
            position_embedding_type=None,
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_head="auto",
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            time_step_limit=None,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=_describe_hybrid,
        fit=_named_hybrid,
        gguf_permutes_rotary=True,
        from_gguf=_hybrid_from_gguf,
        renamed={"input_linear": "gate_up_proj", "output_linear": "down_proj"},
        fused={"gate_up_proj": ("gate_proj", "up_proj")},
    ),
)

FAMILIES = (*_GRANITE_FAMILIES, *_GRANITE_HYBRID_FAMILIES)
