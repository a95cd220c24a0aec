"""The order of the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from minivllm.attention.lists.bounds import Run


class Countable(Protocol):
    """A row of a step, as far as its place in it depends on it."""

    @property
    def count(self) -> int:
        """Tokens."""

    @property
    def runs(self) -> Sequence[Run]:
        """Those that have tokens in the row."""


AnyRow = TypeVar("AnyRow", bound=Countable)


def in_step_order(rows: Sequence[AnyRow], few_tokens: int) -> tuple[list[AnyRow], int, int]:
    """The order of rows in every step:
    those with a single token, those with few, those with several (prompt chunks).

    Few are 2 to ``few_tokens`` tokens: drafts that are verified, and chunks as short as these (0: there are
    no such rows). A row with runs is one of several however short it is: attention of few tokens relies on it
    that no query sees a later one. Returns (rows, how many have a single token, how many have few).
    """
    single = [row for row in rows if row.count == 1]
    if len(single) == len(rows):
        return single, len(single), 0
    few = [row for row in rows if 1 < row.count <= few_tokens and not row.runs]
    several = [row for row in rows if row.count > 1 and (row.count > few_tokens or row.runs)]
    return single + few + several, len(single), len(few)
