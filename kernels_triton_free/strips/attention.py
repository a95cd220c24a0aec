"""Attention of single tokens over keys and values in strips: plain operations, of which Inductor makes loops.

The work is cut into pairs of a row and one of the blocks that it reads. Each pair is computed by itself: its scores,
their maximum m, the weights exp(score - m), their sum, and the values mixed by them. Then the pairs of a row are put
together as if their softmax had been one (Dao et al. 2023, "Flash-Decoding"). So a step costs what its blocks cost,
however they are spread over the rows, and all cores have work where a single row has a long context.

Query heads that share a KV head are written one after the other. The compiler puts them into one loop, in which every
key and value is loaded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.strips.visibility import ScoreChange, Visibility, sees

FAR = 2**30
"""A position behind every query."""
UNSEEN = -1e30
"""The score of what is not seen: finite, so that a pair in which nothing is seen counts nothing without a NaN."""


class Pairs(NamedTuple):
    """Rows and the blocks they read, all int32.

    blocks [pairs]: physical blocks. row [pairs]: who reads it. first [pairs]: position of the block's first token, FAR
    for one in which nothing is seen. of_row [rows, width]: the pairs of each row, then any in which nothing is seen.
    """

    blocks: Tensor
    row: Tensor
    first: Tensor
    of_row: Tensor


def attend_to_strips(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pairs: Pairs,
    q_position: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    visibility: Visibility | None = None,
    score_change: ScoreChange | None = None,
) -> Tensor:
    """q [rows, kv_heads, G, D] -> o of the same shape and dtype; sums and softmax in float32.

    k_cache, v_cache: see ``layout``; all values of the blocks that are read are finite, also those that nobody sees.
    q_position int32 [rows]: position of each query, -1 for padding, of which o is finite. sinks: float32
    [kv_heads * G], a logit of each head that joins the denominator of its softmax and has no value. The others: see
    ``kernels_triton_free.attention.paged_flex_attention``.
    """
    _, kv_heads, runs, _, strip = k_cache.shape
    group = q.shape[2]
    places = torch.arange(runs * strip, dtype=torch.int32, device=q.device).view(runs, strip)
    key = pairs.first[:, None, None, None] + places
    query = q_position[pairs.row][:, None, None, None]
    seen = sees(query, key, window, chunk, visibility)
    k, v = k_cache[pairs.blocks].float(), v_cache[pairs.blocks].float()
    own = (q.float() * scale)[pairs.row]
    out = []
    for head in range(group):
        scores = (own[:, :, head, None, :, None] * k).sum(3)  # [pairs, kv_heads, runs, strip]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if score_change is not None:
            heads = torch.arange(kv_heads, dtype=torch.int32, device=q.device) * group + head
            scores = score_change(scores, heads[:, None, None], query, key)
        scores = torch.where(seen, scores, UNSEEN)
        top = scores.amax((2, 3))
        weights = torch.exp(scores - top[:, :, None, None])
        total = weights.sum((2, 3))
        mixed = (weights.flatten(2)[:, :, None, :, None] * v).sum(3).flatten(2)  # [pairs, kv_heads, D]
        # Pairs of one row, put together: [rows, width, kv_heads]
        tops = top[pairs.of_row]
        highest = tops.amax(1)
        if sinks is not None:
            sink = sinks.view(kv_heads, group)[:, head]
            highest = torch.maximum(highest, sink)
        shares = torch.exp(tops - highest[:, None])
        divisor = (shares * total[pairs.of_row]).sum(1)
        if sinks is not None:
            divisor = divisor + torch.exp(sink - highest)
        out.append((shares[..., None] * mixed[pairs.of_row]).sum(1) / divisor[..., None])
    return torch.stack(out, 2).to(q.dtype)
