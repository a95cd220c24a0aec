"""Runs a part of a program: region after region, seam after seam.

Registers are one flat list of tensors. Names became indices of it when the part was bound, and weights flat
lists, so that little Python runs between two regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from minivllm.compilation.regions import CompileRegion, leaves
from minivllm.compilation.row_counts import bound
from minivllm.profiling.spans import span
from minivllm.program.fuse import FusedPieces, Part
from minivllm.program.program import Name, Seam, World
from minivllm.program.seams import Combine, Share

Registers = list[Any]


class Runner:
    """A part whose regions are compiled."""

    def __init__(self, part: Part, compile_region: CompileRegion) -> None:
        """compile_region: makes what is called in place of a region's function."""
        self.inputs = part.inputs
        self._indices: dict[Name, tuple[int, ...]] = {}
        count = 0
        for name in (*part.inputs, *part.trees):
            if name not in self._indices:
                size = sum(1 for _ in leaves(part.trees[name]))
                self._indices[name] = tuple(range(count, count + size))
                count += size
        self._num_inputs = sum(len(self._indices[name]) for name in part.inputs)
        self._room = [None] * (count - self._num_inputs)
        self._results = _picker(self._of(part.results))
        self._steps = [
            _RegionStep(step, self._of(step.reads), self._of(step.gives), compile_region)
            if isinstance(step, FusedPieces)
            else _SeamStep(step, self._of(step.reads), self._of(tuple(step.gives)))
            for step in part.steps
        ]
        self._joined = _shared_steps(self._steps)
        self.rebind()

    def _of(self, names: Sequence[Name]) -> list[int]:
        return [index for name in names for index in self._indices[name]]

    def rebind(self) -> None:
        """Ask for all weights again: they were moved or replaced."""
        for step in self._steps:
            step.rebind()

    def __call__(self, inputs: Sequence[Tensor], world: World) -> tuple[Tensor, ...]:
        """inputs: the tensors of the part's inputs, in their order. Returns those of its results."""
        registers: Registers = [*inputs, *self._room]
        for step in self._steps:
            step.run(registers, world)
        return self._results(registers)

    def join(self, nothing: Tensor, world: World) -> None:
        """Compute the experts of a step in which this engine has no tokens. nothing: [0, hidden]."""
        registers: Registers = [nothing] * (self._num_inputs + len(self._room))
        for step in self._joined:
            step.run(registers, world)


class _RegionStep:
    def __init__(
        self, fused: FusedPieces, reads: Sequence[int], gives: Sequence[int], compile_region: CompileRegion
    ) -> None:
        self._fused = fused
        self._name = fused.name
        self._pick = _picker(reads)
        self._gives = gives
        self._only = gives[0] if len(gives) == 1 else None
        region = fused.region()
        self._function: Callable[..., Any] = compile_region(region) if fused.is_compiled else region.function
        self._bound = self._function

    def rebind(self) -> None:
        weights = [tensor for piece in self._fused.pieces for tensor in leaves(piece.weights())]
        self._bound = bound(self._function, *weights)

    def run(self, registers: Registers, world: World) -> None:
        with span(self._name):
            out = self._bound(*self._pick(registers))
        if self._only is not None:
            registers[self._only] = out
        else:
            for index, tensor in zip(self._gives, out):
                registers[index] = tensor


class _SeamStep:
    def __init__(self, seam: Seam, reads: Sequence[int], gives: Sequence[int]) -> None:
        self.seam = seam
        self._cross = seam.cross
        self._pick = _picker(reads)
        self._gives = gives
        self._weights: tuple[Any, ...] = ()

    def rebind(self) -> None:
        self._weights = self.seam.weights()

    def run(self, registers: Registers, world: World) -> None:
        out = self._cross(world, *self._pick(registers), *self._weights)
        for index in self._gives:
            registers[index] = out


_Step = _RegionStep | _SeamStep


def _shared_steps(steps: Sequence[_Step]) -> list[_Step]:
    """Those from each Share to the next Combine."""
    found: list[_Step] = []
    is_shared = False
    for step in steps:
        seam = step.seam if isinstance(step, _SeamStep) else None
        is_shared = is_shared or isinstance(seam, Share)
        if is_shared:
            found.append(step)
        is_shared = is_shared and not isinstance(seam, Combine)
    return found


def _picker(indices: Sequence[int]) -> Callable[[Registers], tuple[Any, ...]]:
    """Takes these items out of a list, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda registers: ()
    (index,) = indices
    return lambda registers: (registers[index],)
