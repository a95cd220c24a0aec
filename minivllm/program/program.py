"""A model as a program: a list of pieces of arithmetic, and of seams, where the arithmetic of one rank ends.

    Piece   a function of registers and weights; neighbours are joined into one compiled region
    Seam    attention, an exchange between ranks, the passage to another pipeline stage

Registers are what passes from one item to the next, known by name: "stream", "q", "o". A register holds a
tensor, or nested tuples of tensors ("adapters", "cache.3"); None where the engine has no such thing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.stage import Stage

Name = str
"""Of a register."""

Tree = Any
"""A TensorSpec, nested tuples of them, or None."""

Code = Callable[..., Any]
"""Arithmetic: an instance of a frozen dataclass with ``__call__``. Besides its arguments it reads nothing but
its fields and constants of modules, so its repr tells it from every other one."""


@dataclass(frozen=True)
class Piece:
    """Arithmetic of one rank.

    code: called with the registers it reads, then with its weights;
    returns what it gives: one value, or a tuple.
    """

    code: Code
    reads: tuple[Name, ...]
    gives: Mapping[Name, Tree]
    """The registers that change, as regions declare them."""
    weights: Callable[[], tuple[Any, ...]] = tuple
    """Tensors, and nested tuples of them. Called again after weights moved or were replaced."""


class AttendFunction(Protocol):
    """Attention of one layer, or the update of its states; see ``models.model.Attend``."""

    def __call__(self, layer: int, q: Tensor, weights: Any = None) -> Tensor: ...


class World(NamedTuple):
    """What seams lead to, in one step."""

    attend: AttendFunction
    communicator: Communicator | None = None
    """The ranks that divide the layers."""
    stage: Stage | None = None
    group: ExpertGroup | None = None
    """The workers of all engines that divide the experts."""
    note_input: Callable[[int, Tensor], None] | None = None
    """Called with the number of each layer and its input [tokens, hidden], if a drafter reads them."""


class Seam(ABC):
    """A place where a program leaves the arithmetic of one rank. A region ends before it."""

    kind: str
    reads: tuple[Name, ...] = ()
    gives: Mapping[Name, Tree] = {}
    code: Code | None = None
    """What it computes of the first register that it reads, uncompiled, before it crosses."""

    def is_real(self, ranks: int) -> bool:
        """False if a single rank has nothing to do here: the pieces on both sides become neighbours."""
        return True

    def weights(self) -> tuple[Any, ...]:
        """As of a Piece."""
        return ()

    @abstractmethod
    def cross(self, world: World, *values: Any) -> Tensor | None:
        """values: the registers it reads, then its weights.
        Returns the register that it gives, if it gives one."""


Program = Sequence[Piece | Seam]
