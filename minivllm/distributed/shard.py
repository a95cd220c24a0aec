"""Which part of everything that workers divide belongs to one of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Rows = slice | Tensor
"""A range of the rows of a weight, or their indices, int64."""


@dataclass(frozen=True)
class Shard:
    """This worker's share of every parallel layer: part ``rank`` of ``size`` parts."""

    rank: int = 0
    size: int = 1

    def own(self, count: int, unit: int = 1, *, last_get_more: bool = False) -> slice:
        """Its range of ``count`` rows or columns, in whole units but for the last one. What cannot be dealt
        out evenly goes to the first ranks, or to the last ones."""
        units, rank = -(-count // unit), self.size - 1 - self.rank if last_get_more else self.rank
        share, extra = divmod(units, self.size)
        start = rank * share + min(rank, extra)
        stop = start + share + (rank < extra)
        if last_get_more:
            start, stop = units - stop, units - start
        return slice(min(start * unit, count), min(stop * unit, count))


def count_rows(own: Rows) -> int:
    """How many there are."""
    return len(own) if isinstance(own, Tensor) else own.stop - own.start
