"""Attention over a latent cache (multi-head latent attention, DeepSeek-V2, 2024):
gathered blocks and batched products.

A token keeps one vector for all heads, [latent | rotated key], where K and V of every head are made from the
latent by matrices. With these matrices moved to the other side of the products ("absorbed"), all heads share
one key, the whole vector, and one value, the latent alone: attention with a single KV head, whose size (576
in DeepSeek) FlexAttention would round up to 1,024 on a GPU. Every query head is a row of the same product, so
plain batched products do, and what was gathered once serves as keys and as values.
"""

import torch
from torch import Tensor


def latent_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    q_position: Tensor,
    *,
    value_dim: int,
    scale: float,
    blocks_at_once: int = 16,
) -> Tensor:
    """Attention of query tiles of one request each, with an online softmax (Milakov and Gimelshein 2018) over
    pieces of their contexts, so that memory does not grow with the length of the contexts.

    q [tiles, QT, heads, D]: absorbed queries. cache [blocks, block_size, 1, D] of any floating dtype, finite
    wherever block_table leads. block_table int [tiles, width]: blocks of each tile's request in order, as far
    as the longest context goes; any block (the null block) behind the end of a shorter one. q_position int
    [tiles, QT]: position of each query in its sequence, -1 for padding. value_dim: how many leading elements
    of a vector are its value. blocks_at_once: that are gathered for each tile. Products are computed in q's
    dtype, sums and softmax in float32, or float64 if q is. Returns [tiles, QT, heads, value_dim] in q's
    dtype, zero for padding.
    """
    tiles, queries, heads, dim = q.shape
    block_size, width = cache.shape[1], block_table.shape[1]
    rows = q.reshape(tiles, queries * heads, dim)
    position = q_position.repeat_interleave(heads, dim=1)[:, :, None]
    sums = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(tiles, queries * heads, value_dim, dtype=sums, device=q.device)
    total = torch.zeros(tiles, queries * heads, 1, dtype=sums, device=q.device)
    highest = torch.full_like(total, torch.finfo(sums).min)  # finite: where nothing is seen yet, no inf - inf
    for begin in range(0, width, blocks_at_once):
        latent = cache[block_table[:, begin : begin + blocks_at_once]].flatten(1, 3).to(q.dtype)
        key = torch.arange(latent.shape[1], device=q.device) + begin * block_size
        scores = torch.bmm(rows, latent.transpose(1, 2)).to(sums) * scale
        scores.masked_fill_(key > position, -torch.inf)
        reached = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - reached), torch.exp(highest - reached)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights.to(q.dtype), latent[..., :value_dim])
        highest = reached
    out = torch.where(total > 0, out / total, 0.0)
    return out.to(q.dtype).view(tiles, queries, heads, value_dim)
