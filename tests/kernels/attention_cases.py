"""Random query tiles over a poisoned paged cache, and the attention they should give,
query by query in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import TileLists
from kernels_triton_free.strips.visibility import Bounds


@dataclass(frozen=True)
class TileShape:
    """Sizes that are constants of compiled code, apart from the number of tiles."""

    group: int
    tile_size: int
    window: int | None = None
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    num_pages: int = 40
    tiles: int = 6
    max_length: int = 60
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def sees(self, query: int, key: int) -> bool:
        """By the definitions: not behind the query, less than a window away, and in the query's chunk."""
        if key > query or (self.window is not None and query - key >= self.window):
            return False
        return self.chunk is None or key // self.chunk == query // self.chunk

    @property
    def is_limited(self) -> bool:
        return self.window is not None or self.chunk is not None


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of paged_flex_attention,
    and what it should return on the rows that ``is_query`` marks. sinks: none or one tensor."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lists: TileLists
    bounds: Bounds
    kv_position: Tensor
    expected: Tensor
    is_query: Tensor
    sinks: tuple[Tensor, ...] = ()


def attend_float64(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [G, D] over keys, values [n, D]:
    softmax(q k^T * scale) v, with capped scores and sinks [G] if there are."""
    scores = q.double() @ keys.double().T * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = torch.exp(scores)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double())[:, None]
    return (weights / total) @ values.double()


def random_case(
    seed: int, shape: TileShape, dtype: torch.dtype = torch.float32, *, full_lists: bool = True
) -> AttentionCase:
    """The last tile is padding. Pages that no request owns hold NaN,
    the unused end of a last page holds garbage."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    page = shape.page_size
    cache_shape = (2, shape.num_pages, page, shape.kv_heads, shape.head_dim)
    cache = torch.full(cache_shape, torch.nan)
    kv_position = torch.from_numpy(rng.integers(0, 100, (shape.num_pages, page))).int()
    free = list(rng.permutation(np.arange(1, shape.num_pages)))
    q_rows = shape.tile_size * shape.group
    q = torch.randn(shape.tiles, shape.kv_heads, q_rows, shape.head_dim, generator=generator).to(dtype)
    q_position = torch.full((shape.tiles + 3, shape.tile_size), -1, dtype=torch.int32)
    low = torch.zeros_like(q_position)
    counts = np.zeros((2, shape.tiles), dtype=np.int32)
    # What stands past the counts must not matter: it names pages full of NaN.
    listed = np.full((2, shape.tiles, shape.num_pages), free[-1], dtype=np.int32)
    tables: list[list[int]] = []
    for tile in range(shape.tiles - 1):
        queries = int(rng.integers(1, shape.tile_size + 1))
        first = int(rng.choice([0, rng.integers(0, shape.max_length), page - 1, page]))
        length = first + queries
        needed = -(-length // page)
        table = []
        if tables and rng.random() < 0.5:
            # Shares full pages with an earlier tile, or is another tile of the same request.
            other = tables[rng.integers(len(tables))]
            table = other[: rng.integers(0, min(len(other), needed) + 1)]
        table = table + [int(free.pop(0)) for _ in range(needed - len(table))]
        tables.append(table)
        for index, number in enumerate(table):
            kv_position[number] = torch.arange(index * page, (index + 1) * page)
        q_position[tile, :queries] = torch.arange(first, length)
        for row, query in enumerate(range(first, length)):
            low[tile, row] = next(key for key in range(length) if shape.sees(query, key))
        for index, number in enumerate(table):
            keys = range(index * page, (index + 1) * page)
            seen = [[shape.sees(query, key) for key in keys] for query in range(first, length)]
            if not np.any(seen):
                continue
            # A full page may always be listed as one to be masked instead.
            kind = int(full_lists and bool(np.all(seen)) and rng.random() < 0.9)
            listed[kind, tile, counts[kind, tile]] = number
            counts[kind, tile] += 1
        if shape.has_sinks:
            listed[0, tile, counts[0, tile]] = 0
            counts[0, tile] += 1
    if shape.has_sinks:
        cache[1, 0] = 100.0
        cache[1, 0, -1] = 0.0
    sinks = 2 * torch.randn(shape.kv_heads * shape.group, generator=generator)
    for table in tables:
        fresh = torch.randn(2, len(table), page, shape.kv_heads, shape.head_dim, generator=generator)
        # Large numbers everywhere at first: the ends of last pages keep them.
        cache[:, table] = torch.where(cache[:, table].isnan(), fresh * 100, cache[:, table])
    for tile, table in enumerate(tables):
        last = int(q_position[tile].max())
        for position in range(last + 1):
            where = cache[:, table[position // page], position % page]
            cache[:, table[position // page], position % page] = torch.where(
                where.abs() > 5, where / 100, where
            )
    assert len(free) > 1, "the poisoned page must stay free"
    k_cache, v_cache = cache.to(dtype)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    is_query = torch.zeros(shape.tiles, q_rows, dtype=torch.bool)
    for tile, table in enumerate(tables):
        for row, position in enumerate(q_position[tile].tolist()):
            if position < 0:
                continue
            places = [(table[p // page], p % page) for p in range(position + 1) if shape.sees(position, p)]
            numbers, offsets = zip(*places)
            rows = slice(row * shape.group, (row + 1) * shape.group)
            is_query[tile, rows] = True
            for head in range(shape.kv_heads):
                keys, values = k_cache[numbers, offsets, head], v_cache[numbers, offsets, head]
                own = sinks[head * shape.group : (head + 1) * shape.group] if shape.has_sinks else None
                expected[tile, head, rows] = attend_float64(
                    q[tile, head, rows], keys, values, shape.head_dim**-0.5, shape.soft_cap, own
                )
    count_tensors = [torch.from_numpy(c).view(-1, 1, 1) for c in counts]
    page_tensors = [torch.from_numpy(p).view(shape.tiles, 1, 1, -1) for p in listed]
    lists = TileLists(count_tensors[0], page_tensors[0], count_tensors[1], page_tensors[1])
    bounds = Bounds(q_position, low if shape.is_limited else None)
    case = AttentionCase(q, k_cache, v_cache, lists, bounds, kv_position.view(-1), expected, is_query)
    return replace(case, sinks=(sinks,)) if shape.has_sinks else case


def assert_attends(out: Tensor, case: AttentionCase, tolerance: float) -> None:
    """Queries get what they should within ``tolerance`` of the largest output; padding rows are finite."""
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    assert bool(out.isfinite().all()), "nothing of the poisoned pages may leak, not even into padding"
    is_query = case.is_query[:, None, :, None].expand_as(out)
    error = (out.double() - case.expected)[is_query].abs().max()
    assert error <= tolerance * max(1.0, float(case.expected.abs().max())), f"off by {float(error):.2e}"
