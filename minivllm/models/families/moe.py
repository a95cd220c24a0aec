"""Families with experts: Qwen3-MoE, Mixtral and gpt-oss.

Which layers have experts, how a router chooses, and what is checked before any memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.models.entries.entries import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.models.families.dense import Description, dense
from minivllm.models.families.family import Family, defaults
from minivllm.models.families.llama import window_in_every_layer
from minivllm.models.layer_specs import ClampedSwiglu, LayerSpec, MoeSpec

MAX_EXPERTS = 4096
ExpertRule = Callable[[Entries, int], MoeSpec | None]
"""(entries, layer) -> its experts; None where the layer is dense."""


def experts_of(entries: Entries) -> tuple[int, int]:
    """(experts, experts of each token). Raises ModelError if a token cannot have so many."""
    name = "num_local_experts" if entries.get("num_experts") is None else "num_experts"
    num_experts = entries.whole(name, 1, MAX_EXPERTS)
    top_k = entries.whole("num_experts_per_tok", 1, MAX_EXPERTS)
    if top_k > num_experts:
        raise entries.refuse("num_experts_per_tok", top_k, f"there are only {num_experts} experts ({name})")
    return num_experts, top_k


def with_experts(entries: Entries, experts: ExpertRule, **options: Any) -> Description:
    """A dense model (with ``options`` of ``dense``) some of whose layers have experts in place of their MLP."""
    plain = dense(entries, **options)
    mlps = [experts(entries, index) or layer.mlp for index, layer in enumerate(plain.layers)]
    return replace(plain, layers=tuple(replace(layer, mlp=mlp) for layer, mlp in zip(plain.layers, mlps, strict=True)))


def _qwen_moe(entries: Entries, layer: int) -> MoeSpec | None:
    """Every decoder_sparse_step-th layer has experts, but for those listed in mlp_only_layers."""
    listed = entries.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in listed):
        raise entries.refuse("mlp_only_layers", listed, "must list numbers of layers")
    if layer in listed or (layer + 1) % entries.whole("decoder_sparse_step", 1, MAX_LAYERS):
        return None
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("moe_intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=entries.flag("norm_topk_prob")),
        activation=entries.activation("hidden_act"),
    )


def _qwen3_moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """What llama.cpp knows of its experts; the weights of the chosen ones are always normalised there."""
    keys = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    found = {entry: metadata[key] for entry, key in keys.items() if key in metadata}
    return {**found, "norm_topk_prob": True}


def _mixtral(entries: Entries, layer: int) -> MoeSpec:
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=entries.activation("hidden_act"),
    )


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
        return replace(layer, mixer=replace(layer.mixer, attend=layer.mixer.attend._replace(has_sinks=True)))

    return replace(described, layers=tuple(map(with_sinks, described.layers)))


def _with_yarn(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding of a gpt-oss whose configuration names none."""
    if entries.get("rope_parameters") or entries.get("rope_scaling"):
        return entries
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return {**entries, "rope_parameters": yarn}


def _qwen3_moe_windows(entries: Entries) -> tuple[int | None, ...]:
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    return (window if entries.flag("use_sliding_window") else None,) * entries.num_layers


FAMILIES = (
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        gguf_architecture="qwen3moe",
        defaults=defaults(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            use_sliding_window=False,
            sliding_window=4096,
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_local_experts=128,
            norm_topk_prob=False,
            mlp_only_layers=None,
        ),
        describe=partial(
            with_experts,
            experts=_qwen_moe,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm="per head",
            windows=_qwen3_moe_windows,
        ),
        has_windows=True,
        from_gguf=_qwen3_moe_from_gguf,
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        gguf_architecture=None,  # published as "llama"
        defaults=defaults(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            sliding_window=None,
            num_experts_per_tok=2,
            num_local_experts=8,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=partial(with_experts, experts=_mixtral, windows=window_in_every_layer),
        has_windows=True,
    ),
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        gguf_architecture=None,
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
    ),
)
