"""Which rows of a step read the prefix that they share together, on a GPU.

A tile of several rows reads a shared block once for all of them, and multiplies what each row has to itself
with all of its rows. It cannot be part of a FULL graph. So it pays where the shared part is long and memory
is what attention waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minivllm.attention.costs.model import Cost, Work
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.attention.lists.row_groups import BlocksOfTiles, RowGroups, blocks_of_tiles, group_rows

MOST_TILES = 8
"""Of several rows, in a step."""
BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_OF_PIECES = 3.35e12, 4e14, 1.5e-5
"""Assumed, not measured: memory of an H100, what its products reach in attention, and what a layer takes more
where no FULL graph is replayed, and parts of lists are put together."""
ON_BELOW, OFF_ABOVE = 0.9, 1.0
"""Shares of the time of plain attention: below the first one prefixes are read together, above the second one
no longer."""


class SharedRows(NamedTuple):
    """Rows that are read together, until rows come or go. slots: batch slots of the rows of the step, of
    which ``num_entered`` says which requests had them. groups: None if no rows are."""

    slots: np.ndarray
    num_entered: int
    groups: RowGroups | None


class Sharing:
    """Chooses groups of rows. The choice depends on block tables alone, so all ranks choose alike."""

    def __init__(self, context: AttentionContext, size: int, *, always: bool) -> None:
        """size: queries of a tile. always: also where it does not pay."""
        self._context = context
        self._size = size
        self._always = always
        flops = 4 * context.kv_heads * context.query_group * context.head_dim
        self.plain = Cost(0.0, 1 / BYTES_PER_SECOND, 0.0)
        self.shared = Cost(SECONDS_OF_PIECES, 1 / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
        self._on: set[int] = set()
        """First blocks of the groups that were chosen last."""
        self._kept = SharedRows(np.zeros(0, dtype=np.int64), 0, None)

    def choose(self, rows: StepRows) -> RowGroups | None:
        """The rows with a single token or few that are read together; chosen when rows come or go."""
        tables, kept = self._context.tables, self._kept
        slots = rows.slots[: rows.num_single + rows.num_few]
        is_known = kept.num_entered == tables.num_entered and np.array_equal(kept.slots, slots)
        if is_known and kept.groups is not None:  # there may be more drafts by now
            _, tiles = kept.groups.in_tiles(rows.counts[kept.groups.rows], self._size)
            is_known = int(tiles.sum()) <= MOST_TILES
        if not is_known:
            kept = self._kept = SharedRows(slots, tables.num_entered, self._chosen(rows))
        return kept.groups

    def _chosen(self, rows: StepRows) -> RowGroups | None:
        tables, num_rows = self._context.tables, rows.num_single + rows.num_few
        table = tables.block_table.host[rows.slots[:num_rows]]
        # Up to a row's first token its blocks are complete, whatever becomes of drafts.
        complete = rows.starts[:num_rows] // tables.block_size
        ends = (rows.starts + rows.counts - 1) // tables.block_size + 1
        found = group_rows(table, np.arange(num_rows), complete)
        groups: list[tuple[float, float, int, np.ndarray]] = []
        for number in range(int(found.group.max(initial=-1)) + 1):
            own = found.rows[found.group == number]
            own = own[np.cumsum(rows.counts[own]) <= MOST_TILES * self._size]
            if len(own) < 2:
                continue
            read = self._read(table, ends, rows.counts, group_rows(table[own], own, complete[own]))
            work = self._work([len(blocks) for blocks in read.lists], self._size), self._work(ends[own], 1)
            seconds = self.shared.seconds(work[0]) - self.shared.fixed, self.plain.seconds(work[1])
            groups.append((*seconds, len(read.lists), own))
        picked, tiles, total, plain = [], 0, self.shared.fixed, 0.0
        for together, apart, count, own in sorted(groups, key=lambda one: one[0] - one[1]):
            if tiles + count <= MOST_TILES and (self._always or together < apart):
                tiles, total, plain = tiles + count, total + together, plain + apart
                picked.append(own)
        on, self._on = self._on, set()
        heads = {int(table[own[0], 0]) for own in picked}
        pays = total < (OFF_ABOVE if heads & on else ON_BELOW) * plain
        if not picked or not (pays or self._always):
            return None
        chosen = np.concatenate(picked)
        found = group_rows(table[chosen], chosen, complete[chosen])
        if not self._read(table, ends, rows.counts, found).is_clear:
            return None
        self._on = heads
        return found

    def _read(
        self, table: np.ndarray, ends: np.ndarray, counts: np.ndarray, groups: RowGroups
    ) -> BlocksOfTiles:
        """What tiles of these groups read. table, ends, counts: of all rows."""
        own, num_blocks = groups.rows, self._context.num_blocks
        return blocks_of_tiles(table[own], ends[own], counts[own], groups, self._size, num_blocks)

    def _work(self, blocks: np.ndarray | list[int], queries: int) -> Work:
        """Tiles of so many queries that read so many blocks."""
        keys = int(np.sum(blocks)) * self._context.tables.block_size
        return Work(keys * self._context.cache_spec.bytes_per_token, keys * queries)
