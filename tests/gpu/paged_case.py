"""Random requests on a paged cache, cut into the tiles of paged_flex_attention,
and their float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_triton_free.attention import TileLists, pack_tiles, unpack_tiles
from kernels_triton_free.strips.visibility import Bounds


@dataclass(frozen=True)
class PagedCase:
    """Requests that compute their last ``counts[i]`` of ``lengths[i]`` tokens.
    q [tokens, kv_heads, G, D] in order.

    k_cache, v_cache [pages, page_size, kv_heads, D]; kv_position [pages * page_size];
    tables[i]: pages of request i.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    kv_position: Tensor
    tables: list[Tensor]
    lengths: list[int]
    counts: list[int]
    page_size: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5


def make_case(
    lengths: list[int],
    counts: list[int],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 64,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Pages are dealt out in random order, as in a cache that has been used for a while.
    cache_dtype: of K and V, if it is not dtype."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // page_size) for length in lengths]
    num_pages = sum(blocks) + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
    tables = list(order[: sum(blocks)].split(blocks))
    kv_position = torch.zeros(num_pages, page_size, dtype=torch.int32)
    for table in tables:
        kv_position[table] = torch.arange(len(table) * page_size, dtype=torch.int32).view(-1, page_size)
    shape = (num_pages, page_size, kv_heads, head_dim)
    k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    q = torch.randn(sum(counts), kv_heads, group, head_dim, generator=generator)
    return PagedCase(
        q.to(device, dtype),
        k.to(device, cache_dtype or dtype),
        v.to(device, cache_dtype or dtype),
        kv_position.view(-1).to(device),
        [table.to(device) for table in tables],
        lengths,
        counts,
        page_size,
    )


def reference(case: PagedCase, window: int | None = None) -> Tensor:
    """Attention of every request by the definition, in float64 on the values the caches hold."""
    outputs, token = [], 0
    for table, length, count in zip(case.tables, case.lengths, case.counts):
        q = case.q[token : token + count].double()
        k = case.k_cache[table].flatten(0, 1)[:length].double()
        v = case.v_cache[table].flatten(0, 1)[:length].double()
        scores = torch.einsum("qhgd,khd->hgqk", q, k) * case.scale
        query = torch.arange(length - count, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hgqk,khd->qhgd", weights, v))
        token += count
    return torch.cat(outputs)


def bounds_of(position: Tensor, window: int | None) -> Bounds:
    """What queries at these positions see, -1 for padding."""
    return Bounds(position, None if window is None else (position - window + 1).clamp(min=0))


def decode_lists(case: PagedCase, padded: int, window: int | None = None) -> tuple[TileLists, Bounds]:
    """Lists and bounds [capacity, 1] of one tile per request, all pages in the partial list, as on CUDA."""
    device = case.q.device
    width = max(len(table) for table in case.tables) + 1
    count = torch.zeros(padded, 1, 1, dtype=torch.int32)
    pages = torch.zeros(padded, 1, 1, width, dtype=torch.int32)
    position = torch.full((max(padded, 64), 1), -1, dtype=torch.int32)
    for row, (table, length) in enumerate(zip(case.tables, case.lengths)):
        first = 0 if window is None else max(0, length - window) // case.page_size
        own = table[first:]
        count[row], pages[row, 0, 0, : len(own)], position[row] = len(own), own.cpu(), length - 1
    return TileLists(count.to(device), pages.to(device), None, None), bounds_of(position.to(device), window)


def run_decode(attention, case: PagedCase, padded: int, window: int | None = None) -> Tensor:
    """attention: a (compiled) paged_flex_attention with its scale bound.
    Returns [requests, kv_heads, G, D]."""
    lists, bounds = decode_lists(case, padded, window)
    q = torch.zeros(padded, *case.q.shape[1:], dtype=case.q.dtype, device=case.q.device)
    q[: len(case.q)] = case.q
    return attention(q, case.k_cache, case.v_cache, lists, bounds, case.kv_position)[: len(case.q)]


def run_prefill(attention, case: PagedCase, tile_size: int, window: int | None = None) -> Tensor:
    """As run_decode for tiles of several queries, with full and partial lists."""
    device, page = case.q.device, case.page_size
    spans, places, tile_tokens, token = [], [], [], 0
    for table, length, count in zip(case.tables, case.lengths, case.counts):
        for start in range(length - count, length, tile_size):
            end = min(start + tile_size, length)
            place = len(spans) * tile_size
            places += range(place, place + end - start)
            tile_tokens += [*range(token, token + end - start), *[0] * (tile_size - end + start)]
            spans.append((start, end - 1, table.cpu()))
            token += end - start
    while len(spans) < 2:
        spans.append((0, -1, torch.zeros(0, dtype=torch.int32)))
        tile_tokens += [0] * tile_size
    width = max(len(table) for table in case.tables) + 1
    counts = torch.zeros(2, len(spans), 1, 1, dtype=torch.int32)
    pages = torch.zeros(2, len(spans), 1, 1, width, dtype=torch.int32)
    position = torch.full((max(len(spans), 64), tile_size), -1, dtype=torch.int32)
    for tile, (first, last, table) in enumerate(spans):
        begin = 0 if window is None else max(0, first - window + 1) // page
        end = last // page + 1
        # A page is full if every query of the tile sees all of it.
        full = [
            index
            for index in range(begin, end)
            if (index + 1) * page - 1 <= first and (window is None or index * page > last - window)
        ]
        partial = [index for index in range(begin, end) if index not in full]
        for kind, own in enumerate((partial, full)):
            counts[kind, tile] = len(own)
            pages[kind, tile, 0, 0, : len(own)] = table[own]
        position[tile, : last - first + 1] = torch.arange(first, last + 1, dtype=torch.int32)
    counts, pages = counts.to(device), pages.to(device)
    packed = pack_tiles(case.q, torch.tensor(tile_tokens, dtype=torch.int32, device=device), tile_size)
    lists = TileLists(counts[0], pages[0], counts[1], pages[1])
    bounds = bounds_of(position.to(device), window)
    out = attention(packed, case.k_cache, case.v_cache, lists, bounds, case.kv_position)
    return unpack_tiles(out, torch.tensor(places, dtype=torch.int32, device=device), tile_size)
