"""What families with experts have in common:
how many there are, how they are chosen, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.families.dense import Description, dense
from minivllm.families.entries import MAX_LAYERS, MAX_WIDTH, Entries
from minivllm.specs.layers import MlpSpec, MoeSpec

MAX_EXPERTS, MAX_EXPERTS_IN_ALL = 4096, 2**17
GROUP_BEST = 2
"""Experts by whose scores a group of them is judged (DeepSeek-V3)."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts."""
ExpertRule = Callable[[Entries, int], MoeSpec | None]
"""(entries, layer) -> its experts; None where the layer is dense."""


def experts_of(entries: Entries) -> tuple[int, int]:
    """(experts, experts of each token). Raises ModelError if a token cannot have so many."""
    name = next((name for name in _COUNTS if name in entries.entries), None)
    name = name or next((name for name in _COUNTS if name in entries.defaults), _COUNTS[0])
    num_experts = entries.whole(name, 1, MAX_EXPERTS)
    top_k = entries.whole("num_experts_per_tok", 1, MAX_EXPERTS)
    if top_k > num_experts:
        raise entries.refuse("num_experts_per_tok", top_k, f"there are only {num_experts} experts ({name})")
    return num_experts, top_k


def with_experts(entries: Entries, experts: ExpertRule, **options: Any) -> Description:
    """A dense model (with ``options`` of ``dense``) some of whose layers have experts in place of their
    MLP."""
    plain = dense(entries, **options)
    if entries.num_layers * experts_of(entries)[0] > MAX_EXPERTS_IN_ALL:
        rule = (
            f"must make at most {MAX_EXPERTS_IN_ALL} experts together with {experts_of(entries)[0]} in each "
            "layer"
        )
        raise entries.refuse("num_hidden_layers", entries.num_layers, rule)
    mlps = [experts(entries, index) or layer.mlp for index, layer in enumerate(plain.layers)]
    return replace(
        plain, layers=tuple(replace(layer, mlp=mlp) for layer, mlp in zip(plain.layers, mlps, strict=True))
    )


def sigmoid_routing(entries: Entries, num_experts: int, top_k: int) -> Routing:
    """DeepSeek-V3's: sigmoids, corrected when experts are chosen,
    in the best ``topk_group`` of ``n_group`` groups.

    Raises ModelError where the groups do not hold as many experts as a token needs.
    """
    groups, kept = groups_of(entries, num_experts, top_k, GROUP_BEST)
    check_named(entries, "scoring_func", "sigmoid")
    check_named(entries, "topk_method", "noaux_tc")
    return Routing(
        top_k=top_k,
        scores="sigmoid",
        normalized=entries.flag("norm_topk_prob"),
        scale=entries.number("routed_scaling_factor"),
        groups=groups,
        groups_kept=kept,
        group_best=GROUP_BEST,
    )


def groups_of(entries: Entries, num_experts: int, top_k: int, group_best: int) -> tuple[int, int]:
    """(groups, those that a token may choose from). group_best: experts by which a group is judged. Raises
    ModelError where the groups do not hold as many experts as a token needs."""
    groups, kept = entries.whole("n_group", 1, num_experts), entries.whole("topk_group", 1, num_experts)
    if num_experts % groups or (groups > 1 and num_experts // groups < group_best):
        rule = f"must divide the {num_experts} experts into groups of at least {group_best}"
        raise entries.refuse("n_group", groups, rule)
    if kept > groups or kept * (num_experts // groups) < top_k:
        rule = f"must name some of the {groups} groups, with at least {top_k} experts together"
        raise entries.refuse("topk_group", kept, rule)
    return groups, kept


def check_named(entries: Entries, name: str, only: object) -> None:
    """Raises ModelError if an entry names something else than what its family has."""
    value = entries.get(name)
    if value is not None and value != only:
        raise entries.refuse(name, value, f"must be {only!r} in this family")


def shared_mlp(entries: Entries, inner: int) -> MlpSpec:
    """The MLP that all tokens go through beside their experts, with ``inner`` values between."""
    return MlpSpec(inner=inner, activation=entries.activation("hidden_act"))


def is_sparse(entries: Entries, layer: int) -> bool:
    """Qwen's rule: every decoder_sparse_step-th layer has experts,
    but for those listed in mlp_only_layers."""
    listed = entries.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in listed):
        raise entries.refuse("mlp_only_layers", listed, "must list numbers of layers")
    return layer not in listed and (layer + 1) % entries.whole("decoder_sparse_step", 1, MAX_LAYERS) == 0


def experts_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's metadata say of experts, without the architecture's name."""
    keys = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    return {entry: metadata[key] for entry, key in keys.items() if key in metadata}


def layers_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> int | None:
    """Layers without those that guess further tokens, which llama.cpp counts among the others."""
    layers, drafting = entries["num_hidden_layers"], metadata.get("nextn_predict_layers", 0)
    return layers - drafting if isinstance(layers, int) and isinstance(drafting, int) else None


def inner_of_experts(entries: Entries) -> int:
    return entries.whole("moe_intermediate_size", 1, MAX_WIDTH)


SCORES = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of gating functions."""


def experts_after_dense_layers(entries: Entries, layer: int) -> MoeSpec | None:
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
