"""A fused program as text: its regions, their pieces, and the seams between them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.compilation.regions import Size, TensorSpec, leaves
from minivllm.program.fuse import FusedPieces, Part, Plan, Step
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
    fields: str
    """Of the code, with their values; the code of a seam that computes something."""
    where: str
    """Where the class of the code or of the seam begins: file:line."""
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
        if not isinstance(step, FusedPieces) and step.kind == "attend":
            yield steps
            steps = []
    if steps:
        yield steps


def _lines(step: Step) -> Iterator[Line]:
    if not isinstance(step, FusedPieces):
        computes = "" if step.code is None else repr(step.code)
        where, gives = where_class(type(step)), _shown(step.gives)
        yield Line("", type(step).__name__, ", ".join(step.reads), gives, computes, where, is_seam=True)
        return
    for number, piece in enumerate(step.pieces):
        code: Any = piece.code
        kind: Any = type(code)  # for mypy no class is hashable
        name = "" if number else step.name
        values = ", ".join(f"{field.name}={getattr(code, field.name)!r}" for field in fields(code))
        where, gives = where_class(kind), _shown(piece.gives)
        yield Line(name, kind.__name__, ", ".join(piece.reads), gives, values, where)


@cache
def where_class(kind: type) -> str:
    """file:line of a class; the file as seen from the folder that its top-level package lies in."""
    file, (_, line) = Path(inspect.getfile(kind)), inspect.getsourcelines(kind)
    above = kind.__module__.count(".") + (file.name == "__init__.py")
    return f"{file.relative_to(file.parents[above]).as_posix()}:{line}"


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
