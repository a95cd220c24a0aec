"""A program small enough to compute by hand: vectors of four values, layers that multiply and add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.distributed.communicator import Communicator
from minivllm.program.program import Piece, Program, Seam
from minivllm.program.seams import Attend, Gather, Pick, Sum

WIDTH = 4
STREAM = TensorSpec((Size("tokens", 5), WIDTH), torch.float32, torch.device("cpu"))
ROWS = TensorSpec((Size("rows", 3),), torch.int64, torch.device("cpu"))
INPUTS = {"stream": STREAM, "rows": ROWS}


@dataclass(frozen=True)
class Times:
    """A product with a weight [width, width]."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


@dataclass(frozen=True)
class Shift:
    """x + by."""

    by: float

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by


@dataclass(frozen=True)
class Join:
    """Two results: the sum, twice the sum."""

    def __call__(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return x + stream, 2 * (x + stream)


class Ranks(Communicator):
    """One of several ranks whose partners hold the same tensors."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def exchange(self, x: Tensor) -> list[Tensor]:
        return [x] * self.size


class Recorder:
    """Hands out regions as they are, and keeps them."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def __call__(self, region: Region) -> Callable:
        self.regions.append(region)
        return region.function

    @property
    def names(self) -> list[str]:
        return [region.name for region in self.regions]


def layers(weights: list[Tensor], *, by: float = 1.0) -> Program:
    """Layers with one weight each, which is multiplied before and after attention."""
    items: list[Piece | Seam] = []
    for number, weight in enumerate(weights):
        given = lambda weight=weight: (weight,)  # noqa: E731
        items += [
            Piece(Times(), ("stream",), {"q": STREAM}, given),
            Attend(number, STREAM, lambda: None),
            *([Pick()] if number == len(weights) - 1 else []),
            Piece(Times(), ("o",), {"x": STREAM}, given),
            Sum("x", STREAM),
            Piece(Shift(by), ("x",), {"x": STREAM}),
            Piece(Join(), ("x", "stream"), {"h": STREAM, "stream": STREAM}),
        ]
    return [*items, Piece(Shift(0.5), ("h",), {"logits": STREAM}), Gather("logits", STREAM, [WIDTH, WIDTH])]


def by_hand(stream: Tensor, weights: list[Tensor], ranks: int, rows: Tensor, by: float = 1.0) -> Tensor:
    """What ``layers`` compute where attention adds the number of the layer."""
    h: Any = None
    for number, weight in enumerate(weights):
        o = stream @ weight + number
        if number == len(weights) - 1:
            o, stream = o[rows], stream[rows]
        x = (o @ weight) * ranks + by
        h, stream = x + stream, 2 * (x + stream)
    logits: Tensor = h + 0.5
    return logits if ranks == 1 else torch.cat([logits] * ranks, dim=1)
