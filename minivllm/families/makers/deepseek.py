"""DeepSeek-V2 and V3: latent attention, and experts in groups behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.families.dense import Description
from minivllm.families.entries import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Entries
from minivllm.families.experts import (
    MAX_EXPERTS,
    ExpertRule,
    check_named,
    experts_after_dense_layers,
    experts_of,
    groups_of,
    inner_of_experts,
    routing_from_gguf,
    scores_from_gguf,
    shared_mlp,
)
from minivllm.families.family import NEXT_LAYER_HEAD, Family, defaults
from minivllm.families.rotary import read_rotary, score_magnitude
from minivllm.specs.layers import LatentSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is: as in transformers."""


_IN_GROUPS = "group_limited_greedy"


def _describe(entries: Entries, experts: ExpertRule) -> Description:
    """Raises ModelError naming file, field and value where an entry cannot be used."""
    check_named(entries, "moe_layer_freq", 1)
    check_named(entries, "attention.temperature_scale", 0)
    rope_dim = entries.whole("qk_rope_head_dim", 2, MAX_HEAD_DIM)
    if rope_dim % 2:
        raise entries.refuse("qk_rope_head_dim", rope_dim, "must be even, since its elements turn in pairs")
    rotary = read_rotary(entries, rope_dim)
    if rotary.dim != rope_dim:
        raise entries.refuse("partial_rotary_factor", rotary.dim / rope_dim, "must be 1 in this family")
    heads = entries.whole("num_attention_heads", 1, MAX_HEADS)
    kv_heads = entries.optional_whole("num_key_value_heads", 1, MAX_HEADS)
    if kv_heads not in (None, heads):
        raise entries.refuse(
            "num_key_value_heads", kv_heads, f"must be num_attention_heads {heads} in this family"
        )
    nope_dim = entries.whole("qk_nope_head_dim", 1, MAX_HEAD_DIM)
    mixer = LatentSpec(
        heads=heads,
        query_rank=entries.optional_whole("q_lora_rank", 1, MAX_WIDTH),
        kv_rank=entries.whole("kv_lora_rank", 1, MAX_WIDTH),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=entries.whole("v_head_dim", 1, MAX_HEAD_DIM),
        scale=(nope_dim + rope_dim) ** -0.5 * score_magnitude(entries, rotary) ** 2,
        interleaved=entries.flag("rope_interleave"),
        bias=entries.flag("attention_bias"),
        norm_eps=LATENT_EPS,
    )
    mlp = MlpSpec(
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        activation=entries.activation("hidden_act"),
        bias=entries.flag("mlp_bias"),
    )
    eps = entries.norm_eps
    layers = tuple(
        LayerSpec(mixer=mixer, mlp=experts(entries, layer) or mlp, norms=NormSpec(eps=eps))
        for layer in range(entries.num_layers)
    )
    return Description(layers=layers, rotary=(rotary,), norm_eps=eps)


def _v2_experts(entries: Entries, layer: int) -> MoeSpec | None:
    """Softmax over all experts; with topk_method "group_limited_greedy" a group is as good as its best
    expert."""
    if layer < entries.whole("first_k_dense_replace", 0, MAX_LAYERS):
        return None
    num_experts, top_k = experts_of(entries)
    check_named(entries, "scoring_func", "softmax")
    check_named(entries, "norm_topk_prob", False)
    method, groups, kept = entries.get("topk_method"), 1, 1
    if method == _IN_GROUPS:
        groups, kept = groups_of(entries, num_experts, top_k, group_best=1)
    elif method != "greedy":
        raise entries.refuse(
            "topk_method", method, "must be 'greedy' or 'group_limited_greedy' in this family"
        )
    inner, shared = inner_of_experts(entries), entries.whole("n_shared_experts", 0, MAX_EXPERTS)
    return MoeSpec(
        num_experts=num_experts,
        inner=inner,
        routing=Routing(
            top_k=top_k,
            scale=entries.number("routed_scaling_factor"),
            groups=groups,
            groups_kept=kept,
            group_best=1,
        ),
        activation=entries.activation("hidden_act"),
        shared=replace(shared_mlp(entries, shared * inner), bias=entries.flag("mlp_bias"))
        if shared
        else None,
    )


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """V2, or V3 where experts are scored by sigmoids. Newer files have keys of their own for the sizes of
    heads before they are absorbed. Of both magnitudes of YaRN one is stored, times 0.1, which stands for
    both. Without a number of groups there is one."""
    scores = scores_from_gguf(metadata, 1)
    rope, log = dict(entries["rope_parameters"]), metadata.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and log:
        rope["mscale"] = rope["mscale_all_dim"] = 10 * log if isinstance(log, int | float) else log
    rope_dim = metadata.get("rope.dimension_count")
    key_dim = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    nope_dim = key_dim - rope_dim if isinstance(rope_dim, int) and isinstance(key_dim, int) else None
    found = {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, **routing_from_gguf(metadata, entries)}
    return {
        **found,
        "architectures": ["DeepseekV3ForCausalLM" if scores == "sigmoid" else "DeepseekV2ForCausalLM"],
        "scoring_func": scores,
        "topk_method": "noaux_tc"
        if scores == "sigmoid"
        else "greedy"
        if found["n_group"] == 1
        else _IN_GROUPS,
        "head_dim": None,
        "partial_rotary_factor": None,
        "num_key_value_heads": None,
        "rope_parameters": rope,
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": nope_dim,
        "v_head_dim": metadata.get("attention.value_length_mla", metadata.get("attention.value_length")),
        "attention.temperature_scale": metadata.get("attention.temperature_scale", 0),
    }


FAMILIES = (
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        gguf_architecture="deepseek2",
        defaults=defaults(
            vocab_size=102400,
            intermediate_size=11008,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope_interleave=True,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            routed_scaling_factor=1.0,
            topk_method="greedy",
            first_k_dense_replace=0,
        ),
        describe=partial(_describe, experts=_v2_experts),
        from_gguf=_from_gguf,
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",  # and R1, Moonlight, Kimi-K2
        model_type="deepseek_v3",
        gguf_architecture=None,  # published as "deepseek2"
        defaults=defaults(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            max_position_embeddings=4096,
            bos_token_id=0,
            eos_token_id=1,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope_interleave=True,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            routed_scaling_factor=2.5,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            first_k_dense_replace=3,
        ),
        describe=partial(_describe, experts=experts_after_dense_layers),
        has_drafting_layers=True,
        head_names=NEXT_LAYER_HEAD,
    ),
)
