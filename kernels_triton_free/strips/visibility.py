"""Which keys a query sees: an interval of them, whatever the layer attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Visibility = Callable[[Tensor, Tensor], Tensor]
"""(position of a query, position of a key) -> whether the query sees the key;
int32 and bool scalars of a kernel."""
ScoreChange = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(scaled score, query head, position of the query, position of the key) -> score."""


class Bounds(NamedTuple):
    """The keys that queries see, both int32 of any one shape."""

    high: Tensor
    """The last one, included; -1 where nothing is seen. The query itself, unless it sees what follows it."""
    low: Tensor | None = None
    """The first one. None: all up to the last one are seen."""


def sees(key: Tensor, low: Tensor | None, high: Tensor) -> Tensor:
    """Whether keys lie within the bounds, as bool; all int32, of shapes that broadcast."""
    seen = key <= high
    return seen if low is None else seen & (key >= low)
