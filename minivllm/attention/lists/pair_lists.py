"""Pairs of a row and a block that it reads: what single tokens over a cache in strips are cut into.

Three rows at the positions 9, 4 and 6, of which the last two verify drafts of one request, are these pairs
where blocks hold 4 tokens. The last one sees nothing, in any block: rows of fewer blocks need it.

>>> from minivllm.attention.lists.bounds import bounds_of
>>> from minivllm.specs.attention import Reach
>>> table = np.array([[5, 2, 7], [5, 1, 0]], dtype=np.int32)
>>> bounds = bounds_of(np.array([9, 4, 6]), Reach())
>>> pairs = list_pairs(table, np.array([0, 1, 1]), bounds, block_size=4, num_rows=3)
>>> pairs.blocks.tolist(), pairs.row.tolist(), pairs.first[:-1].tolist()
([5, 2, 7, 5, 1, 5, 1, 5], [0, 0, 0, 1, 1, 2, 2, 0], [0, 4, 8, 0, 4, 0, 4])
>>> pairs.of_row.tolist()
[[0, 1, 2], [3, 4, 7], [5, 6, 7]]

All rows read block 5. Pairs of a shared block may come first, side by side, so that all but the first of them
find its keys and values in the cache of the core. Every pair is computed by itself, and ``of_row`` puts the
pairs of a row together in the order of the row: the result is the same, bit for bit.

>>> shared = Readers(row=np.array([0, 1, 2]), place=np.array([0, 0, 0]))
>>> pairs = list_pairs(table, np.array([0, 1, 1]), bounds, block_size=4, num_rows=3, shared=shared)
>>> pairs.blocks.tolist(), pairs.row.tolist(), pairs.first[:-1].tolist()
([5, 5, 5, 2, 7, 1, 1, 5], [0, 1, 2, 0, 0, 1, 2, 0], [0, 0, 0, 4, 8, 4, 4])
>>> pairs.of_row.tolist()
[[0, 3, 4], [1, 5, 7], [2, 6, 7]]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernels_triton_free.strips.attention import FAR
from minivllm.attention.lists.bounds import HostBounds
from minivllm.attention.lists.shared_prefixes import Readers
from minivllm.attention.lists.tile_lists import blocks_read

MIN_BLOCKS = 2
"""Of a row: compiled code wants two of everything that varies."""


class HostPairs(NamedTuple):
    """``Pairs`` on the host, int32."""

    blocks: np.ndarray
    row: np.ndarray
    first: np.ndarray
    of_row: np.ndarray


def list_pairs(
    table: np.ndarray,
    slots: np.ndarray,
    bounds: HostBounds,
    block_size: int,
    num_rows: int,
    shared: Readers | None = None,
) -> HostPairs:
    """The pairs of queries with these bounds [n], each in the batch slot ``slots`` int64 [n], and of as much
    padding as makes ``num_rows``. table int32 [batch slots, max blocks of a request]: physical blocks.
    shared: pairs that come first, of queries that see all keys before them."""
    begin, _, _, end, _ = blocks_read(bounds, bounds, block_size, tells_full=False)
    counts = np.zeros(num_rows, dtype=np.int64)
    counts[: len(slots)] = end - begin
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(num_rows), counts)
    unseen = len(row)
    index = begin[row] + np.arange(unseen) - starts[row]
    blocks = table[slots[row], index]
    place = np.arange(max(MIN_BLOCKS, int(counts.max(initial=0))))
    of_row = np.where(place < counts[:, None], starts[:, None] + place, unseen)
    columns = [blocks, row, index * block_size]
    if shared is not None:
        order = _shared_first(shared, starts, counts)
        columns = [values[order] for values in columns]
        moved = np.full(unseen + 1, unseen)
        moved[order] = np.arange(unseen)
        of_row = moved[of_row]
    if (counts < len(place)).any():
        # The block of another pair need not be fetched once more.
        last = blocks[0] if unseen else 0, 0, FAR
        columns = [np.append(values, value) for values, value in zip(columns, last)]
    return HostPairs(*(values.astype(np.int32) for values in (*columns, of_row)))


def _shared_first(shared: Readers, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """An order of pairs, int64 [pairs], in which those of ``shared`` come first. starts, counts int64 [rows]:
    the first pair of each row, and how many it has."""
    is_read = shared.place < counts[shared.row]
    first = (starts[shared.row] + shared.place)[is_read]
    is_left = np.ones(int(counts.sum()), dtype=bool)
    is_left[first] = False
    return np.concatenate([first, np.flatnonzero(is_left)])
