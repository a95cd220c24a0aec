"""Qwen2-MoE, whose layers have a gated shared MLP beside their experts, and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.models.entries.entries import MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.models.expert_families.experts import (
    experts_from_gguf,
    experts_of,
    inner_of_experts,
    is_sparse,
    shared_mlp,
    with_experts,
)
from minivllm.models.families.dense import Description
from minivllm.models.families.family import Family, defaults
from minivllm.models.layer_specs import MoeSpec


def qwen_experts(entries: Entries, layer: int, *, has_shared: bool = False) -> MoeSpec | None:
    """has_shared: an MLP of ``shared_expert_intermediate_size`` with a gate of its own stands beside them."""
    if not is_sparse(entries, layer):
        return None
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=inner_of_experts(entries),
        routing=Routing(top_k=top_k, normalized=entries.flag("norm_topk_prob")),
        activation=entries.activation("hidden_act"),
        shared=shared_mlp(entries, entries.whole("shared_expert_intermediate_size", 1, MAX_WIDTH))
        if has_shared
        else None,
        shared_gate=has_shared,
    )


def _qwen2_moe(entries: Entries) -> Description:
    """Biases of q, k and v are an entry of their own here."""
    return with_experts(
        entries,
        partial(qwen_experts, has_shared=True),
        qkv_bias="always" if entries.flag("qkv_bias") else "never",
        windows=_qwen2_moe_windows,
    )


def _qwen2_moe_windows(entries: Entries) -> Sequence[int | None]:
    """In every other layer below ``max_window_layers``, or as listed; none at all unless they are switched on."""
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS) if entries.flag("use_sliding_window") else None
    types, last = entries.layer_types(), entries.whole("max_window_layers", 0, 2**31)
    if types is not None:
        return entries.windows_by_type(types, window)
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(entries.num_layers))


def _qwen2_moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """llama.cpp leaves the weights of the chosen experts as they are in this family."""
    found = experts_from_gguf(metadata)
    if "expert_shared_feed_forward_length" in metadata:
        found["shared_expert_intermediate_size"] = metadata["expert_shared_feed_forward_length"]
    return {**found, "norm_topk_prob": False, "qkv_bias": entries["attention_bias"]}


def _qwen3_moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of the chosen experts are always normalised in llama.cpp."""
    return {**experts_from_gguf(metadata), "norm_topk_prob": True}


def _qwen3_moe_windows(entries: Entries) -> tuple[int | None, ...]:
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    return (window if entries.flag("use_sliding_window") else None,) * entries.num_layers


FAMILIES = (
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        gguf_architecture="qwen2moe",
        defaults=defaults(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            decoder_sparse_step=1,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts_per_tok=4,
            num_experts=60,
            norm_topk_prob=False,
            mlp_only_layers=None,
            qkv_bias=True,
        ),
        describe=_qwen2_moe,
        has_windows=True,
        from_gguf=_qwen2_moe_from_gguf,
    ),
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
            experts=qwen_experts,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm="per head",
            windows=_qwen3_moe_windows,
        ),
        has_windows=True,
        from_gguf=_qwen3_moe_from_gguf,
    ),
)
