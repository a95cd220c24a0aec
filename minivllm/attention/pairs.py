"""Single tokens over a cache in strips: which blocks each of them reads, and the compiled loops that attend.

Three rows at the positions 9, 4 and 6, of which the last two verify drafts of one request, are these pairs where
blocks hold 4 tokens. The last one sees nothing, in any block: rows of fewer blocks need it.

>>> table = np.array([[5, 2, 7], [5, 1, 0]], dtype=np.int32)
>>> pairs = list_pairs(table, np.array([0, 1, 1]), np.array([9, 4, 6]), Reach(), block_size=4, num_rows=3)
>>> pairs.blocks.tolist(), pairs.row.tolist(), pairs.first[:-1].tolist()
([5, 2, 7, 5, 1, 5, 1, 5], [0, 0, 0, 1, 1, 2, 2, 0], [0, 4, 8, 0, 4, 0, 4])
>>> pairs.of_row.tolist()
[[0, 1, 2], [3, 4, 7], [5, 6, 7]]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.strips.attention import FAR, Pairs, attend_to_strips
from minivllm.attention.backend import AttentionContext, StepRows
from minivllm.attention.lists.tile_lists import blocks_read
from minivllm.attention.rule import AttentionRule
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.compilation.row_counts import bound
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache

MIN_BLOCKS = 2
"""Of a row: compiled code wants two of everything that varies."""


class HostPairs(NamedTuple):
    """``Pairs`` on the host, int32."""

    blocks: np.ndarray
    row: np.ndarray
    first: np.ndarray
    of_row: np.ndarray


def list_pairs(
    table: np.ndarray, slots: np.ndarray, positions: np.ndarray, reach: Reach, block_size: int, num_rows: int
) -> HostPairs:
    """The pairs of queries at ``positions`` int64 [n], each in the batch slot ``slots`` int64 [n], and of as much
    padding as makes ``num_rows``. table int32 [batch slots, max blocks of a request]: physical blocks."""
    begin, _, _, end, _ = blocks_read(positions, positions, reach, block_size, tells_full=False)
    counts = np.zeros(num_rows, dtype=np.int64)
    counts[: len(positions)] = end - begin
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(num_rows), counts)
    unseen = len(row)
    index = begin[row] + np.arange(unseen) - starts[row]
    blocks = table[slots[row], index]
    place = np.arange(max(MIN_BLOCKS, int(counts.max(initial=0))))
    of_row = np.where(place < counts[:, None], starts[:, None] + place, unseen)
    columns = [blocks, row, index * block_size]
    if (counts < len(place)).any():
        # The block of another pair need not be fetched once more.
        last = blocks[0] if unseen else 0, 0, FAR
        columns = [np.append(values, value) for values, value in zip(columns, last)]
    return HostPairs(*(values.astype(np.int32) for values in (*columns, of_row)))


class PairMetadata(NamedTuple):
    """num_tiles: rows, padding included; a row is what a tile is elsewhere. kernels: for each spec, given what all of
    its layers read alike."""

    num_tiles: int
    kernels: dict[AttentionSpec, Callable]


class RowPairs:
    """Rows of a single token, and drafts that are verified, each of which is a row of its own here.

    One kernel for each spec. ``attend_to_strips`` says how it computes.
    """

    def __init__(self, context: AttentionContext, rule: AttentionRule) -> None:
        self._context, self._rule = context, rule
        self._kernels = {spec: self._compile(spec) for spec in context.specs}

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
            "pairs": Pairs(numbers(pairs), numbers(pairs), numbers(pairs), numbers(rows, Size("blocks of a row", 3))),
            "q_position": numbers(rows),
        }

    def prepare(self, rows: StepRows, first_token: int, least: int) -> PairMetadata:
        """Every token of these rows is a row, and token t of the step is row t; at least ``least`` rows."""
        context = self._context
        slots, positions = rows.slots, rows.starts
        if rows.num_single < len(slots):
            request = np.repeat(np.arange(len(slots)), rows.counts)
            slots, done = slots[request], np.arange(len(request)) - (np.cumsum(rows.counts) - rows.counts)[request]
            positions = positions[request] + done
        num_rows = max(len(slots), least, context.min_rows)
        own_position = np.full(num_rows, -1, dtype=np.int32)
        own_position[: len(slots)] = positions
        q_position = to_device(own_position, context.device)
        pairs: dict[Reach, Pairs] = {}
        for reach in context.reaches:
            # What another rule of visibility shows is not known here.
            own = reach if self._rule.visibility is None else Reach()
            table, size = context.tables.block_table.host, context.tables.block_size
            listed = list_pairs(table, slots, positions, own, size, num_rows)
            pairs[reach] = Pairs(*(to_device(part, context.device) for part in listed))
        return PairMetadata(
            num_rows,
            {spec: bound(kernel, pairs[spec.reach], q_position) for spec, kernel in self._kernels.items()},
        )

    def attend(
        self, tiles: PairMetadata, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [tokens of the step, kv_heads, G, D] -> o of those that are rows, [N, kv_heads, G, D]."""
        num_tokens, num_rows = q.shape[0], tiles.num_tiles
        if num_tokens > num_rows:
            q = q[:num_rows]
        elif num_tokens < num_rows:
            q = F.pad(q, (0, 0, 0, 0, 0, 0, 0, num_rows - num_tokens))
        o: Tensor = tiles.kernels[spec](q, cache.k, cache.v, sinks)
        return o[:num_tokens] if num_tokens < num_rows else o
