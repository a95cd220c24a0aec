"""Which keys a query sees, by their positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Visibility = Callable[[Tensor, Tensor], Tensor]
"""(position of a query, position of a key) -> whether the query sees the key; int32 and bool scalars of a kernel."""
ScoreChange = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(scaled score, query head, position of the query, position of the key) -> score."""


def sees(query: Tensor, key: Tensor, window: int | None, chunk: int | None, visibility: Visibility | None) -> Tensor:
    """Whether queries see keys, by their positions (int, of shapes that broadcast; -1 sees nothing)."""
    if visibility is not None:
        return visibility(query, key)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if chunk is not None:
        seen = seen & (key // chunk == query // chunk)
    return seen
