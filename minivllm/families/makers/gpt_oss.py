"""gpt-oss: attention sinks, biased experts with a clamped activation, a biased router,
windows in half the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.families.dense import Description
from minivllm.families.entries import MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.families.experts import experts_from_gguf, experts_of, with_experts
from minivllm.families.family import Family, defaults
from minivllm.specs.layers import ClampedSwiglu, LayerSpec, MoeSpec


def _gpt_oss(entries: Entries, layer: int) -> MoeSpec:
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=ClampedSwiglu(entries.number("swiglu_alpha"), entries.number("swiglu_limit")),
        bias=True,
        router_bias=True,
    )


def _gpt_oss_windows(entries: Entries) -> Sequence[int | None]:
    """As listed, or in every other layer, beginning with the first."""
    kinds = ("sliding_attention", "full_attention")
    types = entries.layer_types() or [kinds[layer % 2] for layer in range(entries.num_layers)]
    return entries.windows_by_type(types, entries.optional_whole("sliding_window", 1, MAX_POSITIONS))


def _describe_gpt_oss(entries: Entries) -> Description:
    """Every layer has attention sinks."""
    described = with_experts(
        entries, _gpt_oss, qkv_bias="attention_bias", o_bias="attention_bias", windows=_gpt_oss_windows
    )

    def with_sinks(layer: LayerSpec) -> LayerSpec:
        return replace(
            layer, mixer=replace(layer.attention, attend=layer.attention.attend._replace(has_sinks=True))
        )

    return replace(described, layers=tuple(map(with_sinks, described.layers)))


def _with_yarn(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding of a gpt-oss whose configuration names none."""
    if entries.get("rope_parameters") or entries.get("rope_scaling"):
        return entries
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return {**entries, "rope_parameters": yarn}


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its YaRN ramps between frequencies that are not rounded, which a GGUF file cannot say."""
    return {
        **experts_from_gguf(metadata),
        "rope_parameters": {**entries["rope_parameters"], "truncate": False},
    }


FAMILIES = (
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        gguf_architecture="gpt-oss",
        defaults=defaults(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            attention_bias=True,
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        ),
        describe=_describe_gpt_oss,
        rewrite_config=_with_yarn,
        has_windows=True,
        transposes_experts=True,
        gguf_renamed={"post_self_attn_layernorm": "post_attention_layernorm"},
        from_gguf=_from_gguf,
    ),
)
