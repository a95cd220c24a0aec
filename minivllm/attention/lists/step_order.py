"""The order of the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Countable(Protocol):
    """A row of a step, of which only the number of tokens matters here."""

    @property
    def count(self) -> int: ...


AnyRow = TypeVar("AnyRow", bound=Countable)


def in_step_order(rows: Sequence[AnyRow], verify_size: int) -> tuple[list[AnyRow], int, int]:
    """The order of rows in every step: those with a single token, those with few, those with several (prompt chunks).

    Few are 2 to ``verify_size`` tokens, where drafts are verified (0: there are no such rows). Returns (rows, how many
    have a single token, how many have few).
    """
    single = [row for row in rows if row.count == 1]
    if len(single) == len(rows):
        return single, len(single), 0
    few = [row for row in rows if 1 < row.count <= verify_size]
    several = [row for row in rows if row.count > max(1, verify_size)]
    return single + few + several, len(single), len(few)
