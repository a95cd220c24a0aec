"""Single tokens over a cache in strips: the compiled loops that attend, pair by pair (see ``pair_lists``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.strips.attention import Pairs, attend_to_strips
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention.costs.model import Work
from minivllm.attention.interface.backend import AttentionContext, BlockTables, StepRows
from minivllm.attention.interface.rule import AttentionRule
from minivllm.attention.lists.bounds import HostBounds, bounds_of
from minivllm.attention.lists.pair_lists import list_pairs
from minivllm.attention.lists.shared_prefixes import Readers, block_by_block, find_shared
from minivllm.attention.lists.tile_lists import blocks_read
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.compilation.row_counts import bound
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache

MOST_BYTES = 64 << 20
"""The pairs of a step may give so much in any case, in float32."""


class KeptReaders(NamedTuple):
    """Shared blocks of rows in the batch slots ``slots`` int64 [rows], after so many requests had entered.
    readers: None if there are no such blocks."""

    slots: np.ndarray
    num_entered: int
    readers: Readers | None


class PairMetadata(NamedTuple):
    """num_tiles: rows, padding included; a row is what a tile is elsewhere. kernels: for each spec, given
    what all of its layers read alike. num_pairs: in layers of each reach."""

    num_tiles: int
    kernels: dict[AttentionSpec, Callable]
    num_pairs: dict[Reach, int]


class RowPairs:
    """Rows of a single token, and of few tokens, each of which is a row here.

    None of them sees a later one: see ``in_step_order``. One kernel serves all specs that differ only in what
    they see. ``attend_to_strips`` says how it computes.

    Blocks that rows share are read one after the other. That pays where keys and values of a prefix do not
    fit into the last cache of the processor, and costs nothing elsewhere. With 32 MB of cache, 10 rows took
    0.53 to 0.66 of the processor time with a prefix of 61,440 tokens, 0.81 with 30,720, 1.00 with 10,240
    (``bench attention``). Loops in which several rows share every line that is loaded are no faster: products
    in float32 bound them, not memory (0.97 with 2 rows of 3 heads, 1.28 with 4).
    """

    settles = False

    def __init__(self, context: AttentionContext, rule: AttentionRule) -> None:
        self._context = context
        self._rule = rule
        self._has_low = context.has_low and rule.visibility is None
        made = {
            spec: self._compile(spec) for spec in dict.fromkeys(spec.computation for spec in context.specs)
        }
        self._kernels = {spec: made[spec.computation] for spec in context.specs}
        self._can_share = not all(reach.is_limited for reach in context.reaches)
        self._kept = KeptReaders(np.zeros(0, dtype=np.int64), 0, None)

    def _compile(self, spec: AttentionSpec) -> Callable:
        function = partial(attend_to_strips, **self._rule.options(spec))
        constants = spec, self._rule.fingerprint
        region = Region("decode attention over strips", function, self._inputs(spec), constants)
        return self._context.compile_region(region)

    def _inputs(self, spec: AttentionSpec) -> dict[str, Any]:
        context, rows, pairs = self._context, Size("rows", 5, single=1), Size("pairs", 11)
        example = Size("blocks", min(64, context.num_blocks))

        def numbers(*shape: int | Size) -> Any:
            return TensorSpec(shape, torch.int32, context.device)

        heads = context.kv_heads * context.query_group
        cache = context.cache_spec.declare(example, context.tables.block_size, context.device)
        shape = rows, context.kv_heads, context.query_group, context.head_dim
        q = TensorSpec(shape, context.query_dtype, context.device)
        return {
            "q": q,
            "k_cache": cache.k,
            "v_cache": cache.v,
            "sinks": TensorSpec((heads,), torch.float32, context.device) if spec.has_sinks else None,
            "pairs": Pairs(
                numbers(pairs), numbers(pairs), numbers(pairs), numbers(rows, Size("blocks of a row", 3))
            ),
            "bounds": Bounds(numbers(rows), numbers(rows) if self._has_low else None),
        }

    def over(self, tables: BlockTables) -> RowPairs:
        """The same code for requests with other block tables."""
        return RowPairs(replace(self._context, tables=tables), self._rule)

    def prepare(self, rows: StepRows, first_token: int, least: int) -> PairMetadata:
        """Every token of these rows is a row, and token t of the step is row t; at least ``least`` rows."""
        context = self._context
        slots, positions = rows.slots, rows.starts
        if rows.num_single < len(slots):
            slots, positions = np.repeat(slots, rows.counts), rows.positions
        num_rows = max(len(slots), least)

        def of_rows(values: np.ndarray | None, padding: int) -> Tensor:
            padded = np.full(num_rows, padding, dtype=np.int32)
            padded[: len(slots)] = 0 if values is None else values
            return to_device(padded, context.device)

        high = of_rows(positions, -1)
        shared = self.shared_blocks(rows) if self._can_share else None
        read: dict[Reach, tuple[Pairs, Bounds]] = {}
        num_pairs: dict[Reach, int] = {}
        for reach in context.reaches:
            bounds = self._bounds(positions, reach)
            table, size = context.tables.block_table.host, context.tables.block_size
            listed = list_pairs(table, slots, bounds, size, num_rows, None if reach.is_limited else shared)
            num_pairs[reach] = len(listed.blocks)
            pairs = Pairs(*(to_device(part, context.device) for part in listed))
            read[reach] = pairs, Bounds(high, of_rows(bounds.low, 0) if self._has_low else None)
        kernels = {spec: bound(kernel, *read[spec.reach]) for spec, kernel in self._kernels.items()}
        return PairMetadata(num_rows, kernels, num_pairs)

    def _bounds(self, positions: np.ndarray, reach: Reach) -> HostBounds:
        """What tokens at these positions see. What another rule of visibility shows is not known here."""
        return bounds_of(positions, reach if self._rule.visibility is None else Reach())

    def expected_work(self, rows: StepRows) -> dict[Reach, Work]:
        """What a layer of each reach does with the tokens of these rows, without padding."""
        work = {}
        for reach in self._context.reaches:
            bounds = self._bounds(rows.positions, reach)
            begin, _, _, end, _ = blocks_read(
                bounds, bounds, self._context.tables.block_size, tells_full=False
            )
            work[reach] = self._work(int((end - begin).sum()))
        return work

    def work(self, prepared: PairMetadata) -> dict[Reach, Work]:
        """What a layer of each reach does in a step."""
        return {reach: self._work(pairs) for reach, pairs in prepared.num_pairs.items()}

    def _work(self, num_pairs: int) -> Work:
        keys = num_pairs * self._context.tables.block_size
        return Work(keys * self._context.cache_spec.bytes_per_token, keys)

    def has_room(self, rows: StepRows) -> bool:
        """Whether the pairs of these rows are no more than those of all requests of a step that decode at
        their full length, or take no more than MOST_BYTES."""
        context = self._context
        width = context.tables.block_table.host.shape[1]
        blocks = (rows.starts + rows.counts - 1) // context.tables.block_size + 1
        row_bytes = 4 * context.kv_heads * context.query_group * context.head_dim
        most = max(context.max_num_seqs * width, MOST_BYTES // row_bytes)
        return int((rows.counts * blocks).sum()) <= most

    def shared_blocks(self, rows: StepRows) -> Readers | None:
        """The blocks that several rows of the step share, for its tokens. They are looked for when rows come
        or go: what a row appends belongs to it alone."""
        tables, kept = self._context.tables, self._kept
        if kept.num_entered != tables.num_entered or not np.array_equal(kept.slots, rows.slots):
            # Up to a row's first token its blocks are complete, whatever becomes of drafts.
            found = find_shared(tables.block_table.host[rows.slots], rows.starts // tables.block_size)
            readers = block_by_block(found) if len(found.blocks) else None
            kept = self._kept = KeptReaders(rows.slots, tables.num_entered, readers)
        if kept.readers is None or rows.num_single == len(rows.slots):
            return kept.readers
        return kept.readers.of_tokens(rows.counts)

    def attend(
        self,
        tiles: PairMetadata,
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [tokens of the step, kv_heads, G, D] -> o of those that are rows, [N, kv_heads, G, D]."""
        num_tokens, num_rows = q.shape[0], tiles.num_tiles
        if num_tokens > num_rows:
            q = q[:num_rows]
        elif num_tokens < num_rows:
            q = F.pad(q, (0, 0, 0, 0, 0, 0, 0, num_rows - num_tokens))
        o: Tensor = tiles.kernels[spec](q, cache.k, cache.v, sinks)
        return o[:num_tokens] if num_tokens < num_rows else o
