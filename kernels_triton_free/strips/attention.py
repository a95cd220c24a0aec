"""Attention of single tokens over keys and values in strips: plain operations, of which Inductor makes loops.

The work is cut into pairs of a row and one of the blocks that it reads. Each pair is computed by itself: its
scores, their maximum m, the weights exp(score - m), their sum, and the values mixed by them. Then the pairs
of a row are put together as if their softmax had been one (Dao et al. 2023, "Flash-Decoding"). So a step
costs what its blocks cost, however they are spread over the rows, and all cores have work where a single row
has a long context.

What a loop computes from one line of keys or values is written out: a sum for every query head that shares
them, of two rows of strips. The compiler puts these sums into one loop, in which every key and value is
loaded once, and ``torch.cat`` only says where each of them is stored. Everything else is done for all heads
together: a step of few rows spends its time on loops that start, not on what they do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.strips.visibility import Bounds, ScoreChange, Visibility, sees

FAR = 2**30
"""A position behind every query."""
UNSEEN = -1e30
"""The score of what is not seen:
finite, so that a pair in which nothing is seen counts nothing without a NaN."""
MOST_HEADS_OF_TWO_STREAMS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
"""Query heads of a KV head. With AVX-512 a line of bfloat16 is two registers, and two lines for four heads
are 16 sums, in half of the registers. AVX2 has half as many, of half the size."""


class Pairs(NamedTuple):
    """Rows and the blocks they read, all int32.

    blocks [pairs]: physical blocks. row [pairs]: who reads it. first [pairs]: position of the block's first
    token, FAR for one in which nothing is seen. of_row [rows, width]: the pairs of each row, then any in
    which nothing is seen.
    """

    blocks: Tensor
    row: Tensor
    first: Tensor
    of_row: Tensor


def attend_to_strips(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    pairs: Pairs,
    bounds: Bounds,
    *,
    scale: float,
    soft_cap: float | None = None,
    visibility: Visibility | None = None,
    score_change: ScoreChange | None = None,
) -> Tensor:
    """q [rows, kv_heads, G, D] -> o of the same shape and dtype; sums and softmax in float32.

    k_cache, v_cache: see ``layout``; all values of the blocks that are read are finite, also those that no
    query sees. bounds: positions int32 [rows], of which the last is the query's position; (0, -1) for
    padding, of which o is finite. sinks: float32 [kv_heads * G], a logit of each head that joins the
    denominator of its softmax and has no value. The others: see
    ``kernels_triton_free.attention.paged_flex_attention``.
    """
    _, kv_heads, runs, _, strip = k_cache.shape
    group, parts = q.shape[2], v_cache.shape[2]
    run_streams, part_streams = _streams(runs, group), _streams(parts, group)
    tokens, dims = run_streams * strip, part_streams * strip  # that the loops over K and over V take at once
    k = k_cache[pairs.blocks].float().unflatten(2, (-1, run_streams))
    v = v_cache[pairs.blocks].float().unflatten(2, (-1, part_streams)).unflatten(4, (-1, tokens))
    own = materialize(q.float() * scale)[pairs.row]  # else every line of K would convert and scale it again

    sums = [
        (own[:, :, head, None, :, None] * k[:, :, :, stream]).sum(3)
        for head in range(group)
        for stream in range(run_streams)
    ]
    scores = torch.cat(sums, 3).unflatten(3, (group, tokens))  # [pairs, kv_heads, runs / streams, G, tokens]
    place = torch.arange(runs * strip, dtype=torch.int32, device=q.device).view(-1, 1, tokens)
    key = pairs.first[:, None, None, None, None] + place
    low = None if bounds.low is None else bounds.low[pairs.row][:, None, None, None, None]
    high = bounds.high[pairs.row][:, None, None, None, None]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if score_change is not None:
        heads = torch.arange(kv_heads * group, dtype=torch.int32, device=q.device).view(kv_heads, 1, group, 1)
        scores = score_change(scores, heads, high, key)
    seen = sees(key, low, high) if visibility is None else visibility(high, key)
    scores = torch.where(seen, scores, UNSEEN)
    top = scores.amax((2, 4))  # [pairs, kv_heads, G]
    weights = torch.exp(scores - top[:, :, None, :, None])
    total = weights.sum((2, 4))
    sums = [
        (weights[:, :, None, :, head, :, None] * v[:, :, :, stream]).sum((3, 4))
        for head in range(group)
        for stream in range(part_streams)
    ]
    mixed = torch.cat(sums, 3).unflatten(3, (group, dims))  # [pairs, kv_heads, parts / streams, G, dims]

    # Pairs of one row, put together: [rows, width, kv_heads, G]
    tops = materialize(
        top[pairs.of_row]
    )  # else the maximum is taken along of_row, gathering one number at a time
    highest = tops.amax(1)
    if sinks is not None:
        sink = sinks.view(kv_heads, group)
        highest = torch.maximum(highest, sink)
    shares = torch.exp(tops - highest[:, None])
    divisor = (shares * total[pairs.of_row]).sum(1)
    if sinks is not None:
        divisor = divisor + torch.exp(sink - highest)
    o = (shares[:, :, :, None, :, None] * mixed[pairs.of_row]).sum(1) / divisor[:, :, None, :, None]
    return o.transpose(2, 3).flatten(3).to(q.dtype)


def _streams(strips: int, group: int) -> int:
    """How many rows of strips a loop reads side by side.

    Two pages of memory arrive faster together than one after the other: K of 32 rows x 288 tokens was read in
    0.9 of the time, V in 0.85 (two cores with AVX-512). The sums of two strips for a few query heads still
    fit in registers.
    """
    return 2 if strips % 2 == 0 and group <= MOST_HEADS_OF_TWO_STREAMS else 1
