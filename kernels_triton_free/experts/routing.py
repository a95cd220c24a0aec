"""Which experts a token goes to: softmax and sigmoid routers, corrected scores, groups of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SMALLEST_SUM = 1e-20
"""Added to sums of sigmoids, which may all be 0 in float32."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the experts of a token are chosen from its router logits.

    top_k: experts of a token. scores: "softmax" over all experts (Qwen), or "sigmoid" of each one
    (DeepSeek-V3). normalized: the weights of the chosen ones are divided by their sum. With softmax this is
    the softmax over the chosen logits (Mixtral, gpt-oss). scale: a factor of the weights, after that.
    groups: experts lie in so many groups of neighbours,
    and only those of the best ``groups_kept`` can be chosen;
    a group is as good as its ``group_best`` best experts together (DeepSeek-V3: 2).
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 2


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Router logits [tokens, experts] -> (ids int64, weights float32), both [tokens, top_k],
    computed in float32.

    correction: float32 [experts], added to the scores when experts are chosen, but not when they are weighted
    (DeepSeek-V3, "auxiliary-loss-free load balancing").
    """
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    preference = scores if correction is None else scores + correction
    if routing.groups > 1:
        in_groups = preference.unflatten(-1, (routing.groups, -1))
        best = in_groups.topk(routing.group_best, dim=-1).values.sum(-1)
        kept = best.topk(routing.groups_kept, dim=-1).indices
        is_kept = (kept.unsqueeze(-1) == torch.arange(routing.groups, device=logits.device)).any(-2)
        preference = in_groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = preference.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return ids, weights if routing.scale == 1.0 else weights * routing.scale
