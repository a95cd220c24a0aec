"""Rows that share the beginning of their blocks, in query tiles together: where they lie, and what each tile
reads.

Three rows begin with block 5, and two of them go on with block 8. Sorted by their block tables, they follow
one another in tiles of two queries. A tile lists what some of its rows share, and then the other blocks of
each; ``first`` and ``last`` say which queries, counted over all tiles, read a block:

>>> table = np.array([[5, 8, 2, 7], [5, 4, 0, 0], [5, 8, 9, 0]], dtype=np.int32)
>>> groups = group_rows(table, np.arange(3), np.array([3, 1, 2]))
>>> groups.rows.tolist(), groups.group.tolist()
([0, 2, 1], [0, 0, 0])
>>> ends, counts = np.array([4, 3, 2]), np.ones(3, dtype=int)
>>> read = blocks_of_tiles(table[groups.rows], ends, counts, groups, size=2, num_blocks=10)
>>> [blocks.tolist() for blocks in read.lists]
[[5, 8, 2, 7, 9], [5, 4]]
>>> [(block, int(read.first[block]), int(read.last[block])) for block in (5, 8, 2, 7, 9, 4)]
[(5, 0, 3), (8, 0, 2), (2, 0, 1), (7, 0, 1), (9, 1, 2), (4, 2, 3)]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minivllm.attention.lists.shared_prefixes import find_shared


class RowGroups(NamedTuple):
    """Rows of groups; rows of a group share their first block. All int64 but for ``blocks``."""

    rows: np.ndarray
    """[n]: rows of the step, in the order in which they lie in tiles."""
    group: np.ndarray
    """[n]: the number of its group, from 0 on."""
    blocks: np.ndarray
    """int32 [shared blocks]: physical blocks, in the order of their places."""
    first: np.ndarray
    """[shared blocks]: index in ``rows`` of the first row that reads each."""
    last: np.ndarray
    """[shared blocks]: of the last one."""
    num_shared: np.ndarray
    """[n]: blocks at the beginning of each of these rows that others read too."""

    def in_tiles(self, counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the first of the ``counts`` int64 [n] queries of each row lies, counted over all tiles of
        ``size`` queries, and the number of tiles of each group. No tile holds rows of two groups."""
        totals = np.bincount(self.group, weights=counts).astype(np.int64)
        tiles = -(-totals // size)
        begin = (np.cumsum(tiles) - tiles) * size - (np.cumsum(totals) - totals)
        return np.cumsum(counts) - counts + begin[self.group], tiles


def group_rows(table: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> RowGroups:
    """Those of the rows ``rows`` int64 [n] that share blocks with others, among their first ``counts`` int64
    [n] blocks. table int32 [n, blocks]: their block tables."""
    found = find_shared(table, counts)
    order = found.rows
    heads = table[order, 0]
    group = np.cumsum(np.concatenate([[0], heads[1:] != heads[:-1]])[: len(order)])
    return RowGroups(rows[order], group, found.blocks, found.first, found.last, found.num_shared[order])


class BlocksOfTiles(NamedTuple):
    """What tiles read."""

    lists: list[np.ndarray]
    """int32 [blocks of a tile] for each tile: physical blocks."""
    first: np.ndarray
    """int32 [num_blocks]: the first query that reads a block, counted over all tiles."""
    last: np.ndarray
    """int32 [num_blocks]: the query behind the last one that reads it; 0 for blocks that none reads."""
    is_clear: bool
    """No block is read at two places, which these two numbers cannot say. It happens where equal blocks
    follow different ones."""


def blocks_of_tiles(
    table: np.ndarray, ends: np.ndarray, counts: np.ndarray, groups: RowGroups, size: int, num_blocks: int
) -> BlocksOfTiles:
    """What tiles of ``size`` queries read. table int32 [n, blocks]: block tables of the rows of ``groups``,
    in their order. ends int64 [n]: the blocks that each has up to its last query. counts int64 [n]: its
    queries."""
    place, tiles = groups.in_tiles(counts, size)
    own = ends - groups.num_shared  # blocks that only this row reads
    row = np.repeat(np.arange(len(own)), own)
    begin = np.cumsum(own) - own
    blocks = table[row, groups.num_shared[row] + np.arange(len(row)) - begin[row]]
    first, last = np.zeros(num_blocks, dtype=np.int32), np.zeros(num_blocks, dtype=np.int32)
    first[blocks], last[blocks] = place[row], (place + counts)[row]
    first[groups.blocks] = place[groups.first]
    last[groups.blocks] = (place + counts)[groups.last]
    lists = []
    for tile in range(int(tiles.sum())):
        low = int(np.searchsorted(place + counts, tile * size, side="right"))  # its first row
        high = int(np.searchsorted(place, (tile + 1) * size))  # the row behind its last one
        shared = groups.blocks[(groups.first < high) & (groups.last >= low)]
        lists.append(np.concatenate([shared, blocks[begin[low] : begin[high - 1] + own[high - 1]]]))
    num_read = len(blocks) + len(groups.blocks)
    return BlocksOfTiles(lists, first, last, int((last > 0).sum()) == num_read)
