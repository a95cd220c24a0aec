"""A fused program as text: its regions, their pieces, and the seams between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from minivllm.compilation.regions import Size, TensorSpec, leaves
from minivllm.program.fuse import Part, Plan, Run, Step
from minivllm.program.program import Name, Tree


class Line(NamedTuple):
    """One piece, or one seam."""

    region: str
    """Name of the region that begins here; empty inside of one, and at a seam."""
    what: str
    """Name of the code, or of the seam."""
    reads: str
    gives: str
    """With shapes, where they are declared."""
    is_seam: bool = False


class Section(NamedTuple):
    """Lines of neighbouring layers that compute the same thing:
    those of one, and how many layers there are."""

    lines: tuple[Line, ...]
    layers: int


def sections(plan: Plan) -> list[Section]:
    """A plan from top to bottom, cut after each attention, with equal neighbours told once."""
    found: list[Section] = []
    for part in (plan.body, plan.tail):
        if part is None:
            continue
        for steps in _cut_after_attention(part):
            lines = tuple(line for step in steps for line in _lines(step))
            if found and _without_numbers(found[-1].lines) == _without_numbers(lines):
                found[-1] = found[-1]._replace(layers=found[-1].layers + 1)
            else:
                found.append(Section(lines, 1))
    return found


def _cut_after_attention(part: Part) -> Iterator[Sequence[Step]]:
    steps: list[Step] = []
    for step in part.steps:
        steps.append(step)
        if not isinstance(step, Run) and step.kind == "attend":
            yield steps
            steps = []
    if steps:
        yield steps


def _lines(step: Step) -> Iterator[Line]:
    if not isinstance(step, Run):
        yield Line("", type(step).__name__, ", ".join(step.reads), _shown(step.gives), is_seam=True)
        return
    for number, piece in enumerate(step.pieces):
        name = "" if number else step.name
        yield Line(name, type(piece.code).__name__, ", ".join(piece.reads), _shown(piece.gives))


def _shown(gives: Mapping[Name, Tree]) -> str:
    return ", ".join(f"{name}{_shape(tree)}" for name, tree in gives.items())


def _shape(tree: Tree) -> str:
    specs = list(leaves(tree))
    if len(specs) != 1 or not isinstance(specs[0], TensorSpec):
        return ""
    sizes = (size.name if isinstance(size, Size) else str(size) for size in specs[0].shape)
    return f" [{', '.join(sizes)}]"


def _without_numbers(lines: Sequence[Line]) -> list[str]:
    """Layers differ in the numbers of their caches alone."""
    return [re.sub(r"\bcache\.\d+", "cache", repr(line)) for line in lines]
