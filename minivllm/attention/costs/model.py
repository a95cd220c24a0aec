"""How long attention of a layer takes, by what it reads and multiplies: a + b * bytes + c * products.

There are two ways to attend to chunks of few tokens on a CPU: token by token, as pairs of a token and a
block, and in query tiles, which multiply faster but also what is padding. Which one is faster depends on the
processor. So both are measured when an engine starts, and every step takes the way that should be the faster
one. A model that is wrong costs time, never tokens: both ways compute the same.

Three measurements of something that takes 2 µs, and 1 ns for each product:

>>> of_work = [(Work(0, 1000), 3e-6), (Work(0, 3000), 5e-6), (Work(0, 8000), 10e-6)]
>>> cost = fit(of_work)
>>> round(1e6 * cost.fixed, 6), cost.byte, round(1e9 * cost.product, 6)
(2.0, 0.0, 1.0)
>>> round(1e6 * cost.seconds(Work(0, 20_000)), 6)
22.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from minivllm.attention.interface.backend import BlockTables, StepRows
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


class Work(NamedTuple):
    """What attention of a layer does in a step."""

    num_bytes: int
    """Of keys and values that are read: once for each row of queries, or each copy, that reads them."""
    num_products: int
    """Queries times keys that are multiplied, those that are padding or masked included."""


class Cost(NamedTuple):
    """What one way to attend takes, for the shapes of one kind of layer. All are 0 or more."""

    fixed: float
    """Seconds of a call."""
    byte: float
    """Seconds for each byte."""
    product: float
    """Seconds for each product, of all query heads together."""

    def seconds(self, work: Work) -> float:
        """Of a layer."""
        return self.fixed + self.byte * work.num_bytes + self.product * work.num_products


class Costs(NamedTuple):
    """Of both ways."""

    pairs: Cost
    tiles: Cost


ASSUMED = Costs(pairs=Cost(0, 0, 1.5), tiles=Cost(0, 0, 1.0))
"""Until something is measured, and where nothing is: as it was in float32 on one core with AVX-512. Not in
seconds: only which way costs more can be asked."""


class Way(Protocol):
    """One way to attend."""

    def expected_work(self, rows: StepRows) -> Mapping[Reach, Work]:
        """What a layer of each reach would do with these rows."""

    def over(self, tables: BlockTables) -> Way:
        """The same code for requests with other block tables."""

    def prepare(self, rows: StepRows, first_token: int, least: int) -> Any: ...

    def work(self, prepared: Any) -> Mapping[Reach, Work]:
        """What a layer of each reach does in a step for which that was prepared."""

    def attend(
        self, prepared: Any, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor: ...


def fit(samples: Sequence[tuple[Work, float]]) -> Cost:
    """The costs, none below 0, that come closest to measured (work, seconds), in relative terms.

    Few numbers are looked for, so all choices of those that are not 0 are tried: the best one without a
    negative number is the least-squares solution. ValueError without samples.
    """
    if not samples:
        raise ValueError("There is nothing to fit to.")
    work = np.array([(1, *one) for one, _ in samples], dtype=np.float64)
    seconds = np.array([seconds for _, seconds in samples])
    # Every equation is divided by its time, and every column by its size: numbers near 1 solve well.
    size = np.maximum(work.max(0), 1)
    scaled = work / size / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for columns in combinations(range(3), count):
            part = scaled[:, columns]
            found = np.linalg.lstsq(part, np.ones(len(samples)))[0]
            off = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and off < least * (1 - 1e-9):
                best, least = np.zeros(3), off
                best[list(columns)] = found
    return Cost(*(best / size).tolist())
