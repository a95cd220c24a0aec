"""Query tiles of a step: consecutive queries of one request each, the blocks they read,
and the kernels that attend.

A tile is one row of FlexAttention's batch dimension, so it never reads the blocks of another request: see
``kernels_triton_free.attention`` for the mask, and ``tile_lists`` for the lists of blocks with an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.attention import (
    TileLists,
    chunks_of_tiles,
    chunks_of_tokens,
    pack_tiles,
    paged_flex_attention,
    unpack_tiles,
)
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.attention.interface.rule import AttentionRule
from minivllm.attention.lists.bounds import HostBounds, bounds_of, first_seen_on_device
from minivllm.attention.lists.key_groups import KeyGroups
from minivllm.attention.lists.tile_lists import (
    BlockLists,
    CutTiles,
    blocks_read,
    cut_tiles,
    new_lists,
    write_lists,
)
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.device.buffers import StagingBuffer, rounded_capacity, to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


class Tiles(NamedTuple):
    """T tiles of QT queries on the device, padding included, for N tokens of the step.

    lists: reach of layers -> blocks of the T tiles. bounds: reach of layers -> what each query sees, int32
    [capacity, QT]; kv_position: what that is counted in, see ``attend_to_blocks``. tile_tokens int32 [T *
    QT]: token of the step behind each query; token_places int32 [N]: tile * QT + query of each token;
    to_tiles int [T * kv_heads * QT], to_tokens int [N * kv_heads]: the same in chunks, see
    ``chunks_of_tiles``. All four are None where token t is tile t. step_blocks int32 [n, group]: blocks that
    are copied side by side before they are read, each group as one block, in which lists then count; None
    where the cache is read in place.
    """

    num_tiles: int
    lists: dict[Reach, TileLists]
    bounds: dict[Reach, Bounds]
    kv_position: Tensor | None
    step_blocks: Tensor | None = None
    tile_tokens: Tensor | None = None
    token_places: Tensor | None = None
    to_tiles: Tensor | None = None
    to_tokens: Tensor | None = None


Seen = dict[Reach, HostBounds]
"""Reach of layers -> what each query sees, [T, QT]."""
Edges = dict[Reach, tuple[HostBounds, HostBounds]]
"""Reach of layers -> what the first and the last query of each tile see, [T]."""


class TilesRead(NamedTuple):
    """Fields of Tiles, of which the bounds are on the host yet, without padding tiles."""

    lists: dict[Reach, TileLists]
    bounds: Seen
    kv_position: Tensor | None
    step_blocks: Tensor | None


def edges_of(cut: CutTiles, seen: Seen) -> Edges:
    """What the first and the last query of each tile see."""
    tile = np.arange(len(cut.row))
    return {reach: (bounds.at((tile, 0)), bounds.at((tile, cut.last))) for reach, bounds in seen.items()}


class QueryTiles:
    """Tiles of ``size`` queries that read the cache in place, and the compiled kernels:
    one for all specs that differ only in what they see.

    kind: names the compiled regions. capacity: most tiles of a step. fixed_lists: lists have a place of their
    own, as wide as there can be blocks, which is where a graph reads them again. tells_full: wholly visible
    blocks have lists of their own. compute_dtype: of queries and products, if it is another than that of the
    queries.
    """

    settles = True

    def __init__(
        self,
        context: AttentionContext,
        rule: AttentionRule,
        kind: str,
        size: int,
        capacity: int,
        *,
        fixed_lists: bool = False,
        tells_full: bool = True,
        compute_dtype: torch.dtype | None = None,
        batches: Sequence[int] = (),
        width: int | None = None,
    ) -> None:
        """batches: numbers of tiles that have a kernel of their own; empty where one serves them all. width:
        of lists with a place of their own, if they are not those of single rows."""
        self._context = context
        self._rule = rule
        self._kind = kind
        self.size = size
        self._tells_full = tells_full
        self._compute_dtype = compute_dtype
        self._capacity = capacity = rounded_capacity(capacity)
        self._has_low = (context.has_low or self.mixes_rows) and rule.visibility is None
        self._bound_names = {
            reach: [f"{name}.{index}" for name in Bounds._fields[: 1 + self._has_low]]
            for index, reach in enumerate(context.reaches)
        }
        fields: dict[str, tuple[int, ...]] = {
            name: (capacity, size) for names in self._bound_names.values() for name in names
        }
        if size > 1:
            fields |= {name: (capacity * size,) for name in ("tile_tokens", "token_places")}
        self._list_names: dict[Reach, list[str]] = {}
        has_sinks = any(spec.has_sinks for spec in context.specs)
        # One entry stays unused.
        self._width = width = width or context.tables.block_table.host.shape[1] + 1 + has_sinks
        if fixed_lists:
            if tells_full:  # the CPU's template asserts that lists of whole blocks are as wide as the cache
                self._width = width = context.num_blocks
            for index, reach in enumerate(context.reaches):
                names = [f"{name}.{index}" for name in BlockLists._fields[: 4 if tells_full else 2]]
                self._list_names[reach] = names
                fields |= {name: (capacity, 1, 1, *([] if "count" in name else [width])) for name in names}
        self._buffer = StagingBuffer(fields, context.device, depth=context.launches_ahead)
        # What a graph reads of the order of chunks has a place, as lists have.
        self._chunks: list[Tensor] = []
        if fixed_lists and size > 1:
            shape = 2, capacity * size * context.kv_heads
            self._chunks = [*torch.zeros(shape, dtype=torch.int32, device=context.device)]
        self._has_batches = bool(batches)
        self._kernels: dict[tuple[AttentionSpec, int | None], tuple[Callable, Reach]] = {}
        for batch in batches or (None,):
            made = {
                one: self._compile(one, batch)
                for one in dict.fromkeys(spec.computation for spec in context.specs)
            }
            for spec in context.specs:
                self._kernels[spec, batch] = made[spec.computation], spec.reach

    def _compile(self, spec: AttentionSpec, batch: int | None) -> Callable:
        context, rule = self._context, self._rule
        dtype = (self._compute_dtype if self.size > 1 else None) or context.query_dtype
        own: Any = self._kernel_options(dtype)
        function = partial(self._kernel(), **rule.options(spec), **self._options(), kernel_options=own)
        name = self._kind if batch is None else f"{self._kind} of {batch}"
        constants = (spec, rule.fingerprint, self._options(), own)
        return self._context.compile_region(Region(name, function, self._inputs(spec, batch), constants))

    def _kernel_options(self, dtype: torch.dtype) -> Mapping[str, int]:
        """dtype: of the queries."""
        context = self._context
        block_size = context.tables.block_size
        return context.policy.kernel_options(block_size, context.head_dim, dtype, self.size, self._has_low)

    @property
    def mixes_rows(self) -> bool:
        """Whether a tile may hold queries of several rows."""
        return False

    def _bundles(self, groups: KeyGroups | None, counts: np.ndarray) -> np.ndarray | None:
        """See ``cut_tiles``. groups: what these rows read, from ``_copied``."""
        return None

    def _kernel(self) -> Callable:
        return paged_flex_attention

    def _options(self) -> dict[str, Any]:
        """What the kernel is told beside the rule."""
        return {}

    def _inputs(self, spec: AttentionSpec, batch: int | None) -> dict[str, Any]:
        """What the kernel of a spec takes, for ``batch`` tiles or any number of them."""
        context, size = self._context, self.size
        tables, device, keeps_packages = context.tables, context.device, context.policy.keeps_packages
        tiles: int | Size = Size("tiles", 5, single=1 if size == 1 else None) if batch is None else batch
        # An example with no more blocks than there are:
        # code that indexes by them must not look out of bounds.
        example = min(64, context.num_blocks)
        blocks: int | Size = Size("blocks", example) if keeps_packages else context.num_blocks
        width: int | Size = Size("listed blocks", example) if keeps_packages else self._width
        dtype = (self._compute_dtype if size > 1 else None) or context.query_dtype
        cache = context.cache_spec.declare(blocks, tables.block_size, device)

        def numbers(*shape: int | Size) -> TensorSpec:
            return TensorSpec(shape, torch.int32, device)

        count, listed = numbers(tiles, 1, 1), numbers(tiles, 1, 1, width)
        bounds: Any = [numbers(self._capacity, size)] * (1 + self._has_low)
        # Lists without a fixed place always come in pairs.
        all_four = self._tells_full or not self._list_names
        lists: Any = (count, listed, count, listed) if all_four else (count, listed, None, None)
        heads = context.kv_heads * context.query_group
        sinks = {"sinks": TensorSpec((heads,), torch.float32, device)} if spec.has_sinks else {}
        return {
            "q": TensorSpec(
                (tiles, context.kv_heads, size * context.query_group, context.head_dim), dtype, device
            ),
            "k_cache": cache.k,
            "v_cache": cache.v,
            "lists": TileLists(*lists),
            "bounds": Bounds(*bounds),
            "kv_position": numbers(tables.kv_position.host.size),
            **sinks,
        }

    def prepare(self, rows: StepRows, first_token: int, least: int, least_tokens: int = 0) -> Tiles:
        """Tiles of these rows, whose tokens begin with token ``first_token`` of the step;
        at least ``least``, from which at least ``least_tokens`` are unpacked."""
        self._buffer.begin()
        host, device, size = self._buffer.host, self._buffer.device, self.size
        packing: tuple[Tensor, ...] = ()
        ahead, groups = None, None
        if size == 1:
            each = np.arange(len(rows.starts))[:, None]
            cut = CutTiles(each, rows.starts[:, None], each, np.ones_like(each, dtype=bool))
            count = max(len(each), least)
        else:
            groups = self._copied(rows)
            # Tiles that read more blocks take longer, and each thread computes a run of neighbouring tiles.
            hands = torch.get_num_threads() if self._context.policy.on_cpu else 1
            cut = cut_tiles(rows.starts, rows.counts, size, hands, self._bundles(groups, rows.counts))
            count = max(len(cut.row), least)
            if rows.ahead is not None:
                ahead = rows.ahead[cut.token]
            tile_tokens = host["tile_tokens"].reshape(-1, size)
            tile_tokens[: len(cut.row)] = np.where(cut.is_query, first_token + cut.token, 0)
            tile_tokens[len(cut.row) : count] = 0
            places = np.flatnonzero(cut.is_query)
            places = places[np.argsort(tile_tokens[: len(cut.row)][cut.is_query])]
            num_tokens = max(len(places), least_tokens)
            host["token_places"][: len(places)] = places
            host["token_places"][len(places) : num_tokens] = 0
            packing = device["tile_tokens"][: count * size], device["token_places"][:num_tokens]
        seen = {reach: bounds_of(cut.position, self._read_reach(reach), ahead) for reach in self._bound_names}
        read = self._read(rows, cut, seen, count, groups)
        for reach, bounds in read.bounds.items():
            for name, values, padding in zip(self._bound_names[reach], bounds, (-1, 0)):
                if values is not None:  # else it is 0 everywhere, as the buffer is
                    host[name][: len(values)] = np.where(cut.is_query, values, padding)
                    host[name][len(values) : count] = padding
        self._buffer.commit()
        if packing:
            heads = self._context.kv_heads
            chunks = [chunks_of_tiles(packing[0], size, heads), chunks_of_tokens(packing[1], size, heads)]
            if self._chunks:
                chunks = [place[: len(new)].copy_(new) for place, new in zip(self._chunks, chunks)]
            packing += (*chunks,)
        sent = {
            reach: Bounds(*(device[name] for name in names)) for reach, names in self._bound_names.items()
        }
        if rows.shift is not None and self.settles:
            self._settle(sent, rows.shift, None if size == 1 else packing[0] - first_token)
        return Tiles(count, read.lists, sent, read.kv_position, read.step_blocks, *packing)

    def _settle(self, bounds: dict[Reach, Bounds], shift: Tensor, tokens: Tensor | None) -> None:
        """Move bounds back by ``shift`` int64 [tokens of these rows]. tokens int [tiles * size]: which of
        them each query is, none of them for padding, which sees nothing in any case; None: each is a tile."""
        moved = shift if tokens is None else shift[tokens.clamp(min=0)]
        for reach, (high, low) in bounds.items():
            seen = high.view(-1)[: len(moved)]
            seen -= moved
            if low is not None and reach.is_limited:
                low.view(-1)[: len(moved)] = first_seen_on_device(seen, reach)

    def _copied(self, rows: StepRows) -> KeyGroups | None:
        """What is copied for these rows before it is read; None: the cache is read in place."""
        return None

    def _read(
        self, rows: StepRows, cut: CutTiles, seen: Seen, count: int, groups: KeyGroups | None
    ) -> TilesRead:
        """What these tiles read, padded to ``count`` of them. groups: from ``_copied``."""
        tables = self._context.tables
        slots, edges = rows.slots[cut.row[:, 0]], edges_of(cut, seen)
        if rows.unsure is not None:
            lowest = cut.position[:, 0] - rows.unsure[cut.row[:, 0]]
            edges = {
                reach: (bounds_of(lowest, self._read_reach(reach)), last)
                for reach, (_, last) in edges.items()
            }
        lists = self._lists(tables.block_table.host, slots, edges, count, self._width, tables.block_size)
        return TilesRead(lists, seen, tables.kv_position.device.view(-1), None)

    def _lists(
        self,
        table: np.ndarray,
        slots: np.ndarray,
        edges: Edges,
        count: int,
        width: int,
        block_size: int,
    ) -> dict[Reach, TileLists]:
        """Blocks of the tiles, by reach; in lists of this width unless they have a fixed place."""
        lists: dict[Reach, TileLists] = {}
        for reach, (first, last) in edges.items():
            names = self._list_names.get(reach)
            fixed = [self._buffer.host[name][:count, 0, 0] for name in names or ()]
            if len(fixed) < 4:
                fixed += new_lists(count, 0 if fixed else width)[len(fixed) :]
            host = BlockLists(*fixed)
            read = blocks_read(
                first,
                last,
                block_size,
                tells_full=self._tells_full and self._rule.visibility is None,
                with_null=reach.has_sinks,
            )
            write_lists(host, read, table, slots)
            if names is None:
                sent = [to_device(array, self._context.device)[:, None, None] for array in host]
            else:
                sent = [self._buffer.device[name][:count] for name in names]
            lists[reach] = TileLists(*sent, *[None] * (4 - len(sent)))
        return lists

    def _read_reach(self, reach: Reach) -> Reach:
        """What is read where queries should reach so far. What another rule of visibility shows is not known
        here: then all blocks that are not behind the queries are read."""
        return reach if self._rule.visibility is None else Reach(has_sinks=reach.has_sinks)

    def _arguments(self, tiles: Tiles, cache: LayerCache, reach: Reach) -> tuple[Any, ...]:
        """What the kernel takes behind the queries, but for sinks."""
        return cache.k, cache.v, tiles.lists[reach], tiles.bounds[reach], tiles.kv_position

    def attend(
        self, tiles: Tiles, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [tokens of the step, kv_heads, G, D] -> o of the tokens of these tiles, [N, kv_heads, G, D];
        where token t is tile t, of all tokens that there are tiles for."""
        kernel, reach = self._kernels[spec, tiles.num_tiles if self._has_batches else None]
        own_sinks = (sinks,) if spec.has_sinks else ()
        arguments = (*self._arguments(tiles, cache, reach), *own_sinks)
        if tiles.tile_tokens is None or tiles.token_places is None:
            num_rows = min(len(q), tiles.num_tiles)
            padding = (0, 0, 0, 0, 0, 0, 0, tiles.num_tiles - num_rows)
            own = q[:num_rows] if num_rows == tiles.num_tiles else F.pad(q, padding)
            o: Tensor = kernel(own, *arguments)
            return o[:num_rows]
        packed = pack_tiles(
            q.to(self._compute_dtype or q.dtype), tiles.tile_tokens, self.size, tiles.to_tiles
        )
        return unpack_tiles(kernel(packed, *arguments), tiles.token_places, self.size, tiles.to_tokens)
