"""Paged attention as FlexAttention (He et al. 2024, "FlexAttention") over query tiles.

Work is cut into tiles of consecutive query positions of one request, and each tile is one row of
FlexAttention's batch dimension. A tile therefore never reads another request's blocks, and one mask rule
serves prefill, chunks, decode and verification alike: a cache slot is visible if its position in the sequence
lies within the bounds of the query. Windows, chunks and images that see themselves are bounds too: data, and
no code.

Tiles of several requests that share a prefix read it once. They list more than each request may see, so they
are told which of their queries read a block (``shared_flex_attention``).

The G = query heads / KV heads that share a KV head are packed as rows of one tile, q [tiles, kv_heads, QT *
G, D], so that keys and values are read once per KV head and any G works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels_triton_free.paged_cache import gather_keys, gather_values
from kernels_triton_free.strips.layout import has_strips
from kernels_triton_free.strips.visibility import Bounds, ScoreChange, Visibility, sees

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions


class TileLists(NamedTuple):
    """Which blocks each tile reads, as FlexAttention wants it.
    All int32; entries past the counts are ignored.

    partial_count, full_count: [tiles, 1, 1]. partial_blocks, full_blocks: [tiles, 1, 1, width].
    Blocks in the full list are visible to every query of the tile; those in the partial list are masked per
    element. full_count and full_blocks are None where every block is listed as partial (CUDA decode: with a
    full list the split of the work follows the size of the whole cache).
    """

    partial_count: Tensor
    partial_blocks: Tensor
    full_count: Tensor | None
    full_blocks: Tensor | None


class Readers(NamedTuple):
    """Which queries read each block that several rows of a tile, or of several tiles, share: those from
    ``first`` up to ``last``, counted over all tiles, int32 [blocks] each. Any numbers for other blocks."""

    first: Tensor
    last: Tensor


class FlexOptions(TypedDict, total=False):
    """What ``paged_flex_attention`` is told beside its tensors."""

    scale: Required[float]
    soft_cap: float | None
    visibility: Visibility | None
    score_change: ScoreChange | None
    kernel_options: FlexKernelOptions | None


def paged_flex_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor,
    sinks: Tensor | None = None,
    **options: Unpack[FlexOptions],
) -> Tensor:
    """Attention of query tiles over blocks.
    To be compiled: uncompiled FlexAttention computes the whole square.

    q [tiles, kv_heads, QT * G, D], a real buffer with row (i, g) = query i, head g of the group.
    k_cache, v_cache [blocks, block_size, kv_heads, D] in q's dtype.
    bounds: int32 [capacity, QT], positions in the sequence of each query, (0, -1) for padding; capacity >=
    tiles is fixed. kv_position int32 [>= blocks * block_size]: position in its sequence of what each cache
    slot holds.
    sinks: float32 [kv_heads * G], a logit of each head that joins the softmax's denominator and has no value
    (Xiao et al. 2024; learned in gpt-oss). The last slot of block 0 stands for it: block 0 is listed as
    partial in every tile, nothing else of it is visible, and V is zero there.
    soft_cap: scaled scores s become cap * tanh(s / cap). visibility: replaces the bounds; blocks it does not
    show whole must be listed as partial. score_change: a change of the (capped) scores before the softmax,
    such as a bias by distance. For both the last position that a query sees must be its own.
    Returns a tensor like q; padding rows hold arbitrary finite values.
    """
    blocks, block_size, kv_heads, head_dim = k_cache.shape
    k, v = (
        cache.view(1, blocks * block_size, kv_heads, head_dim).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    where = lists, bounds, kv_position, sinks
    return attend_to_blocks(q, k, v, *where, block_size=block_size, **options)


def shared_flex_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor,
    readers: Readers,
    sinks: Tensor | None = None,
    **options: Unpack[FlexOptions],
) -> Tensor:
    """``paged_flex_attention`` of tiles of several rows, each of which sees the blocks that it reads. A tile
    lists what some of its rows share, and then the other blocks of each, so all have one softmax."""
    blocks, block_size, kv_heads, head_dim = k_cache.shape
    k, v = (
        cache.view(1, blocks * block_size, kv_heads, head_dim).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    where = lists, bounds, kv_position, sinks
    return attend_to_blocks(q, k, v, *where, block_size=block_size, readers=readers, **options)


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor | None,
    sinks: Tensor | None = None,
    *,
    block_size: int,
    scale: float,
    soft_cap: float | None = None,
    visibility: Visibility | None = None,
    score_change: ScoreChange | None = None,
    readers: Readers | None = None,
    kernel_options: FlexKernelOptions | None = None,
) -> Tensor:
    """``paged_flex_attention`` over k, v [1, kv_heads, blocks * block_size, D].

    readers: see ``shared_flex_attention``. None: all queries of a tile read its blocks.
    kv_position: as there. None: the bounds are slots. Or [capacity, 1]: the position of a key less its slot,
    where the partial blocks of a tile lie in order (all of them, if there is a score_change).
    """
    rows = q.shape[2]
    low, high = bounds.low, bounds.high
    group = rows // high.shape[1]

    def position(tile: Tensor, slot: Tensor) -> Tensor:
        if kv_position is None:
            return slot
        return kv_position[slot] if kv_position.dim() == 1 else slot + kv_position.view(-1)[tile]

    def visible(tile: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        query, key = row // group, position(tile, slot)
        if visibility is not None:
            seen = visibility(high[tile, query], key)
        else:
            seen = sees(key, None if low is None else low[tile, query], high[tile, query])
        if readers is not None:
            block, place = slot // block_size, tile * high.shape[1] + query
            seen = seen & (readers.first[block] <= place) & (place < readers.last[block])
        return seen if sinks is None else (seen & (slot >= block_size)) | (slot == block_size - 1)

    def changed(score: Tensor, tile: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        query_head = head * group + row % group
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if score_change is not None:
            score = score_change(score, query_head, high[tile, row // group], position(tile, slot))
        return score if sinks is None else torch.where(slot == block_size - 1, sinks[query_head], score)

    block_mask = BlockMask(
        seq_lengths=(rows, k.shape[2]),
        kv_num_blocks=lists.partial_count,
        kv_indices=lists.partial_blocks,
        full_kv_num_blocks=lists.full_count,
        full_kv_indices=lists.full_blocks,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(-(-rows // 128) * 128 if q.is_cuda else rows, block_size),
        mask_mod=visible,
    )
    score_mod = None if score_change is None and soft_cap is None and sinks is None else changed
    return flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, kernel_options=kernel_options
    )


def gathered_flex_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step_blocks: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor | None,
    sinks: Tensor | None = None,
    **options: Unpack[FlexOptions],
) -> Tensor:
    """As paged_flex_attention over a copy, in q's dtype, of only the blocks this step reads.

    k_cache, v_cache: plain, or in strips. step_blocks int32 [n, group]: physical blocks, of which each group
    makes one larger block of the copy, the first of only block 0 where there are sinks; ``lists`` counts in
    them. bounds, kv_position: see ``attend_to_blocks``. Slots of the copy are cheaper than positions: what a
    mask takes longest for on a CPU is to read a table for every score.
    On a CPU FlexAttention repacks all of K and V for bfloat16 tiles of 64 rows and more: repacking a few
    blocks instead of the cache makes the fast bfloat16 products pay for prefill.
    """
    blocks, size = step_blocks.flatten(), v_cache.shape[3] if has_strips(v_cache) else v_cache.shape[1]
    k, v = (
        gather(cache, blocks)[None] for gather, cache in ((gather_keys, k_cache), (gather_values, v_cache))
    )
    where = lists, bounds, kv_position, sinks
    return attend_to_blocks(
        q, k.to(q.dtype), v.to(q.dtype), *where, block_size=step_blocks.shape[1] * size, **options
    )


def attend_to_copies(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step_blocks: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor | None,
    to_tiles: Tensor,
    to_tokens: Tensor,
    sinks: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: Unpack[FlexOptions],
) -> Tensor:
    """``gathered_flex_attention`` of tokens, which are packed into tiles before it and unpacked behind it.

    q [tokens, kv_heads, G, D]. to_tiles int32 [tiles, kv_heads, QT]: from ``chunks_of_tiles``. to_tokens
    int32 [n, kv_heads]: from ``chunks_of_tokens``, of n tokens.
    dtype: in which it is computed, if not in that of q. Returns [n, kv_heads, G, D] in q's dtype.
    """
    group = q.shape[2]
    # Looked up in four dimensions, which is the real buffer that FlexAttention wants.
    rows = (to_tiles[..., None] * group + torch.arange(group, dtype=to_tiles.dtype, device=q.device)).flatten(
        2
    )
    tiles = q.to(dtype or q.dtype).flatten(0, 2)[rows]
    where = lists, bounds, kv_position
    out = gathered_flex_attention(tiles, k_cache, v_cache, step_blocks, *where, sinks, **options)
    return out.unflatten(2, (-1, group)).flatten(0, 2)[to_tokens].to(q.dtype)


def gathered_sdpa_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    first_position: int,
    sinks: Tensor | None = None,
    bounds: Bounds | None = None,
    *,
    scale: float,
    soft_cap: float | None = None,
    visibility: Visibility | None = None,
    score_change: ScoreChange | None = None,
) -> Tensor:
    """Reference for one request: gather its blocks and run scaled dot-product attention.

    q [queries, kv_heads, G, D] at consecutive positions from first_position; blocks int [n] in order,
    covering all of them, plain or in strips. bounds: int32 [queries], None: all see up to themselves. sinks,
    soft_cap, visibility, score_change: as for paged_flex_attention, but nothing stands for the sinks. Values
    may have another size than keys. Returns a tensor like q, of that size. Runs uncompiled, wherever PyTorch
    does.
    """
    queries, kv_heads, group, head_dim = q.shape
    length = first_position + queries
    k = gather_keys(k_cache, blocks)[:, :length].to(q.dtype)
    v = gather_values(v_cache, blocks)[:, :length].to(q.dtype)
    query = torch.arange(first_position, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    if visibility is not None:
        visible = visibility(query, key)
    elif bounds is None:
        visible = sees(key, None, query)
    else:
        visible = sees(key, None if bounds.low is None else bounds.low[:, None], bounds.high[:, None])
    heads = q.reshape(queries, kv_heads * group, head_dim).transpose(0, 1)
    if score_change is None and soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            heads[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=group > 1
        )[0]
    else:
        head = torch.arange(kv_heads * group, device=q.device)[:, None, None]
        scores = heads @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if score_change is not None:
            scores = score_change(scores, head, query, key)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)], dim=-1)
        out = scores.softmax(-1)[..., :length] @ v.repeat_interleave(group, 0)
    return out.transpose(0, 1).reshape(queries, kv_heads, group, v.shape[-1])


def chunks_of_tiles(tile_tokens: Tensor, tile_size: int, kv_heads: int) -> Tensor:
    """tile_tokens int [tiles * tile_size] -> int [tiles * kv_heads * tile_size]: where what each tile holds
    is found among the chunks (token, KV head) of q. The same for all layers of a step."""
    head = torch.arange(kv_heads, dtype=tile_tokens.dtype, device=tile_tokens.device)
    return (tile_tokens.view(-1, 1, tile_size) * kv_heads + head[:, None]).flatten()


def chunks_of_tokens(token_places: Tensor, tile_size: int, kv_heads: int) -> Tensor:
    """token_places int [n] -> int [n * kv_heads]: where each token's chunks are found in the tiles."""
    head = torch.arange(kv_heads, dtype=token_places.dtype, device=token_places.device)
    tile, row = token_places // tile_size, token_places % tile_size
    return ((tile[:, None] * kv_heads + head) * tile_size + row[:, None]).flatten()


def pack_tiles(q: Tensor, tile_tokens: Tensor, tile_size: int, chunks: Tensor | None = None) -> Tensor:
    """Gather tokens into tiles. q [tokens, kv_heads, G, D], tile_tokens int [tiles * tile_size] (padding:
    any token).

    chunks: what chunks_of_tiles says, if that is known.
    Returns a new buffer [tiles, kv_heads, tile_size * G, D].
    """
    _, kv_heads, group, head_dim = q.shape
    if chunks is None:
        chunks = chunks_of_tiles(tile_tokens, tile_size, kv_heads)
    tiles = q.reshape(-1, group * head_dim).index_select(0, chunks)
    return tiles.view(-1, kv_heads, tile_size * group, head_dim)


def unpack_tiles(out: Tensor, token_places: Tensor, tile_size: int, chunks: Tensor | None = None) -> Tensor:
    """Inverse of pack_tiles. out [tiles, kv_heads, tile_size * G, D], token_places int [n]:
    tile * tile_size + row.

    chunks: what chunks_of_tokens says, if that is known. Returns [n, kv_heads, G, D].
    """
    _, kv_heads, rows, head_dim = out.shape
    group = rows // tile_size
    if chunks is None:
        chunks = chunks_of_tokens(token_places, tile_size, kv_heads)
    tokens = out.reshape(-1, group * head_dim).index_select(0, chunks)
    return tokens.view(-1, kv_heads, group, head_dim)
