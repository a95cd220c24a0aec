"""GLM-4: norms before and after both sublayers;
GLM-4.5: sigmoid routing, a shared MLP, and dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from minivllm.families.dense import Description, dense
from minivllm.families.entries import Entries
from minivllm.families.experts import (
    experts_after_dense_layers,
    routing_from_gguf,
    scores_from_gguf,
    with_experts,
)
from minivllm.families.family import FUSED_MLP, NEXT_LAYER_HEAD, Family, defaults
from minivllm.specs.decoder import DecoderConfig


def pairs_to_halves(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Rows of q and k in another order:
    pairs of elements 2i and 2i + 1, which GLM-4 rotates, become i and i + half.

    The same order in q and k leaves every score as it is.
    """
    module = name.split(".")[-2]
    if module not in ("q_proj", "k_proj"):
        return tensor
    mixer, dim = config.layers[0].attention, config.rotary[0].dim
    heads = tensor.unflatten(0, (-1, mixer.head_dim)).clone()
    heads[:, : dim // 2], heads[:, dim // 2 : dim] = heads[:, 0:dim:2].clone(), heads[:, 1:dim:2].clone()
    return heads.flatten(0, 1)


_GLM_FAMILIES = (
    Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        gguf_architecture="glm4",
        defaults=defaults(
            vocab_size=151552,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1.5625e-07,
            partial_rotary_factor=0.5,
            attention_bias=True,
            eos_token_id=[151329, 151336, 151338],
        ),
        describe=partial(dense, qkv_bias="attention_bias", norms="both"),
        fused=FUSED_MLP,
        rewrite_weight=pairs_to_halves,
    ),
)


def _glm4_moe(entries: Entries) -> Description:
    """Heads of q and k have norms in the larger of the two published models."""
    qk_norm = "per head" if entries.flag("use_qk_norm") else None
    return with_experts(entries, experts_after_dense_layers, qkv_bias="attention_bias", qk_norm=qk_norm)


def _moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**routing_from_gguf(metadata, entries), "scoring_func": scores_from_gguf(metadata, 2)}


_GLM_MOE_FAMILIES = (
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
        head_names=NEXT_LAYER_HEAD,
        gguf_renamed={"post_self_attn_layernorm": "post_attention_layernorm"},
        from_gguf=_moe_from_gguf,
    ),
)

FAMILIES = (*_GLM_FAMILIES, *_GLM_MOE_FAMILIES)
