"""Which blocks each query tile reads: wholly visible ones, and partial ones, which are masked inside.

All queries of the tile see all of a block that is *wholly visible*. The lists call it ``full``, as
FlexAttention does; elsewhere a full block is one whose cache slots are all filled.

A small step as a worked example. Blocks hold 4 tokens, prompt chunks are cut into tiles of 4 queries, and the
requests in batch slots 0 to 2 own these blocks (block 5 is shared through the prefix cache):

>>> table = np.array([[5, 2, 7, 0], [5, 1, 3, 0], [9, 4, 6, 8]], dtype=np.int32)

Slot 0 decodes the token at position 9, slot 1 verifies drafts at positions 6 to 8, and slot 2 takes in a
chunk of positions 3 to 9, which is cut into the tiles 3 to 6 and 7 to 9. Every tile is its batch slot, its
first and its last position:

>>> slots, first, last = np.array([0, 1, 2, 2]), np.array([9, 6, 3, 7]), np.array([9, 8, 6, 9])

A tile needs the blocks up to that of its last query, ``last // 4 + 1`` of them. Those that end at or before
its first query, ``(first + 1) // 4`` of them, are wholly visible:

>>> from minivllm.attention.lists.bounds import bounds_of
>>> from minivllm.specs.attention import Reach
>>> def read(reach):
...     bounds = bounds_of(first, reach), bounds_of(last, reach)
...     return blocks_read(*bounds, block_size=4, with_null=reach.has_sinks)
>>> ranges = read(Reach())
>>> lists = new_lists(tiles=4, width=4)
>>> write_lists(lists, ranges, table, slots)
>>> for tile in range(4):
...     full = lists.full[tile, : lists.full_count[tile]]
...     partial = lists.partial[tile, : lists.partial_count[tile]]
...     print(f"slot {slots[tile]}, queries {first[tile]}-{last[tile]}: full {full}, partial {partial}")
slot 0, queries 9-9: full [5 2], partial [7]
slot 1, queries 6-8: full [5], partial [1 3]
slot 2, queries 3-6: full [9], partial [4]
slot 2, queries 7-9: full [9 4], partial [6]
>>> lists.full.shape, lists.full_count.shape
((4, 4), (4,))

With a sliding window of 4 tokens, blocks in front of it are not read at all,
and the one that it begins in is partial:

>>> write_lists(lists, read(Reach(window=4)), table, slots)
>>> [lists.partial[tile, : lists.partial_count[tile]].tolist() for tile in range(4)]
[[2, 7], [5, 1, 3], [9, 4], [4, 6]]
>>> lists.full_count.tolist()
[0, 0, 0, 0]

In chunks of 8 positions a query sees no key before position 8 from there on.
Sinks list the null block, block 0:

>>> write_lists(lists, read(Reach(chunk=8, has_sinks=True)), table, slots)
>>> [lists.partial[tile, : lists.partial_count[tile]].tolist() for tile in range(4)]
[[7, 0], [5, 1, 3, 0], [4, 0], [9, 4, 6, 0]]
>>> [lists.full[tile, : lists.full_count[tile]].tolist() for tile in range(4)]
[[], [], [9], []]

An image at the positions 6 to 13 sees itself, so queries 4 to 7 read all of its blocks:

>>> blocks_read(HostBounds(high=np.array([4])), HostBounds(high=np.array([13])), block_size=4)._asdict()
{'begin': array([0]), 'full_begin': array([0]), 'full_end': array([1]), 'end': array([4]), 'with_null': False}
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minivllm.attention.lists.bounds import HostBounds


class BlockRanges(NamedTuple):
    """Blocks of its request that each tile reads, int64 [tiles]: from ``begin`` up to ``end``, those from
    ``full_begin`` up to ``full_end`` as wholly visible ones.
    with_null: and the null block as a partial one."""

    begin: np.ndarray
    full_begin: np.ndarray
    full_end: np.ndarray
    end: np.ndarray
    with_null: bool = False


class BlockLists(NamedTuple):
    """Physical blocks of each tile on the host, int32: counts [tiles], blocks [tiles, width], of which those
    past the counts are ignored but lie within the cache."""

    partial_count: np.ndarray
    partial: np.ndarray
    full_count: np.ndarray
    full: np.ndarray


def new_lists(tiles: int, width: int) -> BlockLists:
    """Empty lists."""
    count, blocks = (tiles,), (tiles, width)
    return BlockLists(*(np.zeros(shape, dtype=np.int32) for shape in (count, blocks, count, blocks)))


def blocks_read(
    first: HostBounds, last: HostBounds, block_size: int, *, tells_full: bool = True, with_null: bool = False
) -> BlockRanges:
    """Blocks that tiles read whose first and last queries see ``first`` and ``last``, [tiles] each.

    A block is wholly visible if the first query sees its last cache slot, and the last query its first one.
    tells_full: False lists all of them as partial.
    """
    end = last.high // block_size + 1
    begin = np.zeros_like(end) if first.low is None else first.low // block_size
    if not tells_full:
        return BlockRanges(begin, begin, begin, end, with_null)
    full_begin = begin if last.low is None else np.minimum(-(-last.low // block_size), end)
    full_end = np.maximum((first.high + 1) // block_size, full_begin)
    return BlockRanges(begin, full_begin, full_end, end, with_null)


def write_lists(lists: BlockLists, ranges: BlockRanges, table: np.ndarray, slots: np.ndarray) -> None:
    """Fill the first len(slots) tiles, and empty the others.

    table int32 [batch slots, max blocks of a request]: physical blocks.
    slots int64 [tiles]: batch slot of each tile.
    """
    tiles = len(slots)
    begin, full_begin, full_end, end, with_null = ranges
    num_full = full_end - full_begin
    num_partial = end - begin - num_full
    lists.full_count[:tiles], lists.full_count[tiles:] = num_full, 0
    lists.partial_count[:tiles], lists.partial_count[tiles:] = num_partial, 0
    full_width, partial_width = int(num_full.max(initial=0)), int(num_partial.max(initial=0))
    if full_width and not full_begin.any():
        lists.full[:tiles, :full_width] = table[slots, :full_width]
    elif full_width:
        _take(lists.full[:tiles], table, slots, full_begin[:, None] + np.arange(full_width))
    place = np.arange(partial_width)
    if full_begin is begin:
        _take(lists.partial[:tiles], table, slots, full_end[:, None] + place)
    else:
        # Behind the partial blocks in front of the wholly visible ones come those behind them.
        jump = np.where(place < (full_begin - begin)[:, None], 0, num_full[:, None])
        _take(lists.partial[:tiles], table, slots, begin[:, None] + place + jump)
    if with_null:
        lists.partial[np.arange(tiles), num_partial] = 0
        lists.partial_count[:tiles] += 1


def _take(target: np.ndarray, table: np.ndarray, slots: np.ndarray, index: np.ndarray) -> None:
    """target[t, j] = table[slots[t], index[t, j]], for index int64 [tiles, n];
    past the table's end its last entry."""
    target[:, : index.shape[1]] = table[slots[:, None], np.minimum(index, table.shape[1] - 1)]


class CutTiles(NamedTuple):
    """Queries in tiles, [tiles, size] each. Padding comes last in a tile and repeats its first query."""

    row: np.ndarray
    """int64: the row that a query belongs to."""
    position: np.ndarray
    """int64: of the query in its sequence."""
    token: np.ndarray
    """int64: which of the rows' tokens the query is."""
    is_query: np.ndarray
    """bool: False for padding."""

    @property
    def last(self) -> np.ndarray:
        """Which query of each tile is its last one, int64 [tiles]."""
        return self.is_query.sum(1) - 1


def cut_tiles(
    starts: np.ndarray, counts: np.ndarray, size: int, hands: int, bundles: np.ndarray | None = None
) -> CutTiles:
    """Rows that compute ``counts`` positions from ``starts`` on, int64 [rows], in tiles of ``size``,
    ``dealt`` to so many hands. bundles int64 [rows]: rows with equal numbers follow one another in their
    tiles; None: no tile holds several rows.

    >>> cut = cut_tiles(np.array([8, 4, 8]), np.array([2, 5, 1]), 4, 1, np.array([0, 1, 0]))
    >>> np.where(cut.is_query, cut.row, -1).tolist()
    [[0, 0, 2, -1], [1, 1, 1, 1], [1, -1, -1, -1]]
    >>> np.where(cut.is_query, cut.position, -1).tolist()
    [[8, 9, 8, -1], [4, 5, 6, 7], [8, -1, -1, -1]]
    """
    ordered = np.arange(len(counts)) if bundles is None else np.argsort(bundles, kind="stable")
    if bundles is None:
        totals = counts
    else:
        _, begins = np.unique(bundles[ordered], return_index=True)
        totals = np.add.reduceat(counts[ordered], begins)
    # Tokens in the order of the tiles: bundle by bundle, row by row.
    row = np.repeat(ordered, counts[ordered])
    before = np.cumsum(counts) - counts  # tokens of the rows before each
    placed = np.cumsum(counts[ordered]) - counts[ordered]
    within = np.arange(len(row)) - np.repeat(placed, counts[ordered])
    per_bundle = -(-totals // size)
    bundle = np.repeat(np.arange(len(totals)), per_bundle)
    done = (np.arange(len(bundle)) - (np.cumsum(per_bundle) - per_bundle)[bundle]) * size
    first = (np.cumsum(totals) - totals)[bundle] + done
    order = dealt(starts[row[first]] + within[first], hands)
    first, left = first[order, None], (totals[bundle] - done)[order, None]
    query = np.arange(size)
    is_query = query < left
    index = np.where(is_query, first + query, first)
    return CutTiles(row[index], (starts[row] + within)[index], (before[row] + within)[index], is_query)


def dealt(work: np.ndarray, hands: int) -> np.ndarray:
    """An order of what takes ``work`` [n], in which ``hands`` equal runs take about as much each: dealt like
    cards, the greatest first, back and forth. In the order that it has for a single hand.

    >>> dealt(np.array([1, 2, 3, 4, 5, 6]), hands=2).tolist()
    [5, 2, 1, 4, 3, 0]
    """
    if hands == 1:
        return np.arange(len(work))
    turn = np.arange(len(work)) % (2 * hands)
    hand = np.minimum(turn, 2 * hands - 1 - turn)
    return np.argsort(-work, kind="stable")[np.argsort(hand, kind="stable")]
