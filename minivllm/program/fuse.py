"""Turns a program into regions: neighbouring pieces are joined, up to the next seam that is real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.compilation.regions import Region, Size, TensorSpec, changed, leaves, specs_of
from minivllm.program.program import Code, Name, Piece, Program, Seam, Tree
from minivllm.program.seams import Pick

REGION_NAMES = {
    ("start", "attend"): "first",
    ("start", "sum"): "embed",
    ("receive", "attend"): "entry",
    ("attend", "attend"): "between",
    ("attend", "sum"): "output",
    ("attend", "share"): "enter",
    ("attend", "send"): "exit",
    ("attend", "logits"): "last",
    ("attend", "h"): "hidden states",
    ("sum", "attend"): "queries",
    ("sum", "sum"): "mlp",
    ("sum", "largest"): "inner",
    ("sum", "squares"): "projections",
    ("sum", "share"): "enter",
    ("sum", "send"): "leave",
    ("sum", "gather"): "head",
    ("sum", "logits"): "head",
    ("sum", "h"): "hidden states",
    ("start", "features"): "features",
    ("squares", "attend"): "rotary",
    ("largest", "sum"): "down",
    ("share", "combine"): "experts",
}
"""Regions by the seams before and after them; of several in a row, the first.
The end is named by its result."""


@dataclass(frozen=True)
class Joined:
    """Pieces as one function of a flat list of tensors:
    what the region reads, then the weights of each piece.

    Its repr tells it from every other region's function. Registers are numbered in the order in which they
    appear, so neither their names nor the numbers of layers are in it: equal layers have equal functions.
    """

    codes: tuple[Code, ...]
    wiring: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each piece: the registers that it reads, and those that it gives."""
    inputs: tuple[Tree, ...]
    """Structure of the registers that the region reads, with LEAF in place of tensors."""
    weights: tuple[Tree, ...]
    """Structure of each piece's weights."""
    outputs: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Any:
        values: dict[int, Any] = {}
        taken = 0
        for number, structure in enumerate(self.inputs):
            values[number], taken = _rebuilt(structure, tensors, taken)
        for code, (reads, gives), structure in zip(self.codes, self.wiring, self.weights):
            weights, taken = _rebuilt(structure, tensors, taken)
            out = code(*[values[number] for number in reads], *weights)
            for number, value in zip(gives, (out,) if len(gives) == 1 else out):
                values[number] = value
        results: list[Tensor] = []
        for number in self.outputs:
            if isinstance(value := values[number], Tensor):
                results.append(value)
            else:
                results += leaves(value)
        return results[0] if len(results) == 1 else tuple(results)


LEAF = "·"


def _rebuilt(structure: Tree, tensors: Sequence[Tensor], taken: int) -> tuple[Any, int]:
    """The structure with the tensors from index ``taken`` on, and the index after them."""
    if structure is None:
        return None, taken
    if not isinstance(structure, tuple):
        return tensors[taken], taken + 1
    items = []
    for part in structure:
        item, taken = _rebuilt(part, tensors, taken)
        items.append(item)
    return (type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)), taken


@dataclass(frozen=True)
class PickRows:
    """The picked rows of registers; of tuples, what their ``of`` says.

    dims: which dimension of each register is the tokens; None where there is none, and all of it is kept.
    """

    dims: tuple[int | None, ...]

    def __call__(self, *values: Any) -> Any:
        *picked, rows = values
        out = [self._of(x, dim, rows) for x, dim in zip(picked, self.dims)]
        return out[0] if len(out) == 1 else tuple(out)

    @staticmethod
    def _of(x: Any, dim: int | None, rows: Tensor) -> Any:
        if x is None or dim is None:
            return x
        if not isinstance(x, Tensor):
            return x.of(rows)
        return x[rows] if dim == 0 else x.index_select(dim, rows)


class FusedPieces(NamedTuple):
    """Neighbouring pieces, which become one region."""

    name: str
    pieces: tuple[Piece, ...]
    reads: tuple[Name, ...]
    gives: tuple[Name, ...]
    inputs: Mapping[Name, Tree]
    """What it reads, as it is declared."""
    is_compiled: bool = True

    def region(self) -> Region:
        """The region with the weights of today."""
        weights = [specs_of(piece.weights()) for piece in self.pieces]
        declared = {name: spec for read in self.reads for name, spec in _named(read, self.inputs[read])}
        for number, (piece, specs) in enumerate(zip(self.pieces, weights)):
            declared |= dict(_named(f"{type(piece.code).__name__} {number}", specs))
        joined = self._joined(weights)
        return Region(self.name, joined, declared, joined, has_loops=_has_loops(joined.codes))

    def _joined(self, weights: Sequence[Tree]) -> Joined:
        numbers: dict[Name, int] = {name: number for number, name in enumerate(self.reads)}
        wiring = []
        for piece in self.pieces:
            reads = tuple(numbers[name] for name in piece.reads)
            wiring.append((reads, tuple(numbers.setdefault(name, len(numbers)) for name in piece.gives)))
        return Joined(
            tuple(piece.code for piece in self.pieces),
            tuple(wiring),
            tuple(_structure(self.inputs[name]) for name in self.reads),
            tuple(map(_structure, weights)),
            tuple(numbers[name] for name in self.gives),
        )


Step = FusedPieces | Seam


class Part(NamedTuple):
    """Steps that are run one after the other."""

    inputs: tuple[Name, ...]
    steps: tuple[Step, ...]
    results: tuple[Name, ...]
    trees: Mapping[Name, Tree]
    """Structure of all registers."""


class Plan(NamedTuple):
    """A program as regions and seams. body: up to the Pick, or everything. tail: what follows it, if anything
    does; its inputs are the results of the body, then some of the body's inputs, then "rows"."""

    body: Part
    tail: Part | None


def fuse(
    program: Program,
    inputs: Mapping[Name, Tree],
    *,
    ranks: int = 1,
    results: tuple[Name, ...] = ("logits",),
    label: str = "",
) -> Plan:
    """Join the pieces between real seams.

    inputs: the registers that are there at the beginning, and "rows", as regions declare them. ranks: that
    divide the layers. results: the registers that are wanted; the program ends where the last of them is
    given for the last time. label: begins the name of each region.
    """
    items = [item for item in program if isinstance(item, Piece) or item.is_real(ranks)]
    end = max(
        (index for index, item in enumerate(items) if set(results) & item.gives.keys()),
        default=len(items) - 1,
    )
    items = items[: end + 1]
    return _Fuser(items, inputs, results, label).plan()


class _Fuser:
    def __init__(
        self, items: list[Piece | Seam], inputs: Mapping[Name, Tree], results: tuple[Name, ...], label: str
    ) -> None:
        self._items = items
        self._inputs = inputs
        self._results = results
        self._label = label
        self._alive = _alive_after(items, results)
        self._trees = dict(inputs)
        self._previous = "start"
        self._steps: list[Step] = []
        self._pieces: list[Piece] = []
        self._declared: dict[Name, Tree] = {}
        """Registers as they were declared when the open region began."""

    def plan(self) -> Plan:
        cut = next(
            (index for index, item in enumerate(self._items) if isinstance(item, Pick)), len(self._items)
        )
        names = tuple(name for name in self._inputs if name != "rows")
        if cut == len(self._items):
            is_sent = bool(self._items) and isinstance(self._items[-1], Seam) and not self._items[-1].gives
            self._walk(0, cut)
            return Plan(Part(names, self._taken(), () if is_sent else self._results, self._trees), None)
        self._walk(0, cut)
        following = dict.fromkeys(name for item in self._items[cut + 1 :] for name in item.reads)
        alive = [name for name in following if name in self._alive[cut] and name != "rows"]
        written = {name for item in self._items[:cut] for name in item.gives}
        kept = tuple(name for name in alive if name in written)
        again = tuple(name for name in self._inputs if name in alive and name not in written)
        body = Part(names, self._taken(), kept, self._trees)
        trees = {name: self._trees[name] for name in alive}
        dims = tuple(_token_dim(trees[name]) for name in (*again, *kept))
        picks = Piece(
            PickRows(dims), (*again, *kept, "rows"), {name: trees[name] for name in (*again, *kept)}
        )
        if any(isinstance(item, Seam) for item in self._items[cut + 1 :]):
            gives = (*again, *kept)
            self._steps = [
                FusedPieces(
                    "pick", (picks,), picks.reads, gives, {**trees, "rows": self._trees["rows"]}, False
                )
            ]
        else:
            self._add(picks)
        self._walk(cut + 1, len(self._items))
        return Plan(body, Part((*kept, *again, "rows"), self._taken(), self._results, self._trees))

    def _walk(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            item = self._items[index]
            if isinstance(item, Piece):
                self._add(item)
                continue
            self._close(item.kind, item.reads, self._alive[index] - item.gives.keys())
            self._steps.append(item)
            self._trees.update(item.gives)
        # A program that ends without a seam ends with its result.
        self._close(
            self._results[0] if self._results else "end", (), self._alive[stop - 1] if stop else set()
        )

    def _add(self, piece: Piece) -> None:
        if not self._pieces:
            self._declared = dict(self._trees)
        self._pieces.append(piece)
        self._trees.update(piece.gives)

    def _close(self, following: str, first: tuple[Name, ...], alive: set[Name]) -> None:
        """End the open region before a seam of the kind ``following``,
        which reads the registers ``first``."""
        if self._pieces:
            read, written = list[Name](), list[Name]()
            for piece in self._pieces:
                read += [
                    name for name in dict.fromkeys(piece.reads) if name not in written and name not in read
                ]
                written += [name for name in piece.gives if name not in written]
            wanted = dict.fromkeys((*first, *(name for name in self._trees if name in alive)))
            gives = tuple(name for name in wanted if name in written)
            name = REGION_NAMES.get((self._previous, following), f"{self._previous} to {following}")
            inputs = {name: self._declared[name] for name in read}
            full = f"{self._label} {name}".strip()
            self._steps.append(FusedPieces(full, tuple(self._pieces), tuple(read), gives, inputs))
            self._previous = "sum" if following == "combine" else following
            self._pieces = []
        elif self._previous == "start" and not self._steps:
            self._previous = following

    def _taken(self) -> tuple[Step, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps


def _alive_after(items: Sequence[Piece | Seam], results: Sequence[Name]) -> list[set[Name]]:
    """Of each item: the registers that are read after it, before they are given again."""
    alive, found = set(results), list[set[Name]]()
    for item in reversed(items):
        found.append(alive)
        alive = (alive - item.gives.keys()) | set(item.reads)
    return found[::-1]


@lru_cache(maxsize=1024)
def _has_loops(value: Any) -> bool:
    """Whether a code, or a value in one of its fields, says so."""
    if isinstance(value, tuple):
        return any(map(_has_loops, value))
    if getattr(value, "has_loops", False):
        return True
    return is_dataclass(value) and any(_has_loops(getattr(value, each.name)) for each in fields(value))


def _token_dim(tree: Tree) -> int | None:
    """The first dimension that varies."""
    if not isinstance(tree, TensorSpec):
        return 0
    return next((dim for dim, size in enumerate(tree.shape) if isinstance(size, Size)), None)


def _structure(tree: Tree) -> Tree:
    return changed(tree, lambda leaf: LEAF)


def _named(name: str, tree: Tree) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors of a register, each under a name."""
    found = list(leaves(tree))
    for number, spec in enumerate(found):
        yield (name if len(found) == 1 else f"{name}.{number}"), spec
