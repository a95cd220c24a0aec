"""Blocks at the beginning of several rows: which rows read each of them.

Rows whose block tables begin with the same blocks form a group. Sorted by their block tables, the rows that
read a block follow one another, so a tree of prefixes is no more than a first and a last row for each block.

Rows 0, 2 and 3 begin with block 5, two of them go on with block 8; row 1 shares nothing:

>>> table = np.array([[5, 8, 2, 7], [3, 1, 0, 0], [5, 4, 0, 0], [5, 8, 9, 0]], dtype=np.int32)
>>> found = find_shared(table, np.array([4, 2, 2, 3]))
>>> found.rows.tolist()
[2, 0, 3]
>>> for part in found.blocks, found.place, found.first, found.last:
...     print(part.tolist())
[5, 8]
[0, 1]
[0, 1]
[2, 2]
>>> found.num_shared.tolist()
[2, 0, 1, 2]

``block_by_block`` lists each of these blocks once for each of its rows:

>>> [part.tolist() for part in block_by_block(found)]
[[2, 0, 3, 0, 3], [0, 0, 0, 1, 1]]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SharedBlocks(NamedTuple):
    """Blocks that at least two rows read, in the order of their places; int64 but for ``blocks``."""

    rows: np.ndarray
    """[rows of the groups]: rows that share blocks, sorted by their block tables."""
    blocks: np.ndarray
    """int32 [blocks]: physical blocks."""
    place: np.ndarray
    """[blocks]: place of each in the block tables of its rows."""
    first: np.ndarray
    """[blocks]: index in ``rows`` of the first row that reads it."""
    last: np.ndarray
    """[blocks]: index in ``rows`` of the last row that reads it."""
    num_shared: np.ndarray
    """[all rows]: blocks at the beginning of each row that another row reads too."""


def find_shared(table: np.ndarray, counts: np.ndarray) -> SharedBlocks:
    """The shared ones among the first ``counts`` int64 [rows] blocks of rows with the block tables ``table``
    int32 [rows, blocks]."""
    num_shared = np.zeros(len(table), dtype=np.int64)
    heads = np.where(counts > 0, table[:, 0], -1)
    # Most steps end here: no two rows begin with the same block.
    in_order = np.sort(heads)
    is_repeated = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    if not is_repeated.any():
        none = np.zeros(0, dtype=np.int64)
        return SharedBlocks(none, none.astype(np.int32), none, none, none, num_shared)
    rows = np.flatnonzero(np.isin(heads, in_order[1:][is_repeated]))
    width = int(counts[rows].max())
    # A place past the end of a row equals that of no other row.
    read = np.where(np.arange(width) < counts[rows, None], table[rows, :width], -1 - rows[:, None])
    read = np.ascontiguousarray(read, dtype=np.int32)
    order = np.argsort(read.view(f"V{4 * width}").reshape(-1), kind="stable")
    rows, read = rows[order], read[order]
    none = np.zeros((1, width), dtype=bool)
    # [1 + rows, blocks]: a row begins like the one before it, up to and including this block.
    alike = np.concatenate([none, np.logical_and.accumulate(read[1:] == read[:-1], axis=1), none])
    before, after = alike[:-1], alike[1:]
    num_shared[rows] = (before | after).sum(1)
    place, first = np.nonzero((after & ~before).T)
    _, last = np.nonzero((before & ~after).T)
    return SharedBlocks(rows, read[first, place], place, first, last, num_shared)


class Readers(NamedTuple):
    """Rows with a block that each reads, int64 [n]: block after block, those of one block side by side."""

    row: np.ndarray
    place: np.ndarray
    """Of the block in the row's block table."""

    def of_tokens(self, counts: np.ndarray) -> Readers:
        """The same for the tokens of the rows, which have ``counts`` int64 [rows] of them each."""
        first, several = np.cumsum(counts) - counts, counts[self.row]
        return Readers(_ranges(first[self.row], several), np.repeat(self.place, several))


def block_by_block(found: SharedBlocks) -> Readers:
    """All shared blocks with all of their rows."""
    counts = found.last - found.first + 1
    return Readers(found.rows[_ranges(found.first, counts)], np.repeat(found.place, counts))


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``counts`` numbers from ``first`` on for each pair of them, both int64 [n], one after the other."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)
