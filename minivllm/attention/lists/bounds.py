"""The interval of keys that each query sees, for whatever a layer attends to.

A query at position 9 sees itself and what is before it; with a sliding window of 4 the last four of these,
and in chunks of 8 those of its chunk:

>>> query = np.array([9])
>>> for reach in Reach(), Reach(window=4), Reach(chunk=8), Reach(window=4, chunk=8):
...     print(bounds_of(query, reach))
HostBounds(high=array([9]), low=None)
HostBounds(high=array([9]), low=array([6]))
HostBounds(high=array([9]), low=array([8]))
HostBounds(high=array([9]), low=array([8]))

A run of positions that see themselves, such as an image, ends later than its tokens. Both bounds never
decrease from one query of a request to the next. Positions 4 to 9 with a run from 6 up to 9, in layers with a
window of 4 that look ahead, and in layers that do not:

>>> query, ahead = np.arange(4, 10), look_ahead(np.array([4]), np.array([6]), [[(6, 9)]])
>>> bounds_of(query, Reach(window=4, looks_ahead=True), ahead)
HostBounds(high=array([4, 5, 8, 8, 8, 9]), low=array([1, 2, 3, 4, 5, 6]))
>>> bounds_of(query, Reach(), ahead)
HostBounds(high=array([4, 5, 6, 7, 8, 9]), low=None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.specs.attention import Reach

Run = tuple[int, int]
"""Positions from the first number up to the second one, all of which see each other."""


class HostBounds(NamedTuple):
    """The keys that queries see, int64 of any one shape."""

    high: np.ndarray
    """Position of the last one."""
    low: np.ndarray | None = None
    """Position of the first one. None: all up to the last one are seen."""

    def at(self, index: tuple) -> HostBounds:
        """Some of them."""
        return HostBounds(self.high[index], None if self.low is None else self.low[index])


def bounds_of(query: np.ndarray, reach: Reach, ahead: np.ndarray | None = None) -> HostBounds:
    """What queries at these positions see. ahead: see ``look_ahead``; both int64 of one shape.
    None: no run sees itself."""
    high = ahead if reach.looks_ahead and ahead is not None else query
    return HostBounds(high, first_seen(query, reach) if reach.is_limited else None)


def first_seen(query: np.ndarray, reach: Reach) -> np.ndarray:
    """The first position that queries at these positions see, both int64."""
    begin = np.zeros_like(query) if reach.window is None else np.maximum(query - reach.window + 1, 0)
    return begin if reach.chunk is None else np.maximum(begin, query - query % reach.chunk)


def first_seen_on_device(query: Tensor, reach: Reach) -> Tensor:
    """``first_seen`` for positions that only the device knows, of any int dtype."""
    begin = torch.zeros_like(query) if reach.window is None else (query - reach.window + 1).clamp_(min=0)
    return begin if reach.chunk is None else torch.maximum(begin, query - query % reach.chunk)


def look_ahead(starts: np.ndarray, counts: np.ndarray, runs: Sequence[Sequence[Run]]) -> np.ndarray:
    """The last position that each token of a step sees in layers that look ahead, int64 [tokens].

    starts, counts int64 [rows]: positions that each row computes. runs: of each row, in any order, without
    overlaps. ValueError for a run that goes on where its row ends: its last keys are not in the cache then.
    """
    seen = []
    for start, count, own in zip(starts.tolist(), counts.tolist(), runs, strict=True):
        last = np.arange(start, start + count)
        for begin, end in own:
            if end > start + count:
                raise ValueError(
                    f"Positions {begin} to {end - 1} see themselves, but a row of this step ends with "
                    "position "
                    f"{start + count - 1}. Compute all of them in one step."
                )
            last[max(0, begin - start) : max(0, end - start)] = end - 1
        seen.append(last)
    return np.concatenate(seen)
