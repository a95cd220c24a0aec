"""What a method of a linear layer is: how it stores a weight, and how it multiplies it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from typing import ClassVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from minivllm.device.memory import WeightMemory
from minivllm.weights.stored_weight import StoredWeight

LinearTensors = tuple[Tensor, ...]
"""What a linear layer passes to its method: the prepared weight and whatever else the method needs."""

kept_weights = WeightMemory()


uncompiled_copies: MutableMapping[Tensor, LinearTensors] = WeakTensorKeyDictionary()
"""What code that is not compiled has prepared for itself, of weights in words."""


def forget_uncompiled_copies() -> None:
    """Drop them: compiled code takes over."""
    uncompiled_copies.clear()


class LinearMethod(ABC):
    """How a linear layer stores its weight and computes its product. Quantisation plugs in here.

    Methods are immutable and compare by value: layers with equal methods share one compiled region.
    gathers_rows: whether ``rows`` works, so that a tied embedding needs no second copy of the weight.
    scales_tokens: whether all inputs of a token are rounded by the largest of them, so that workers who
    divide them have to agree.
    """

    gathers_rows: ClassVar[bool] = False
    scales_tokens: ClassVar[bool] = False

    @property
    def has_loops(self) -> bool:
        """Whether code that is compiled for a few rows multiplies in another way than code for more,
        so that it is worth having."""
        return False

    @property
    def rows_read(self) -> tuple[tuple[int, int | None], ...]:
        """Of each of the first tensors: the least and the most rows whose compiled code reads it.
        Further tensors are read for any number."""
        return ()

    def read_by(self, rows: int, tensors: LinearTensors) -> LinearTensors:
        """The tensors that compiled code for so many rows reads; of views on the same memory, one."""
        ranges = (*self.rows_read, *[(1, None)] * len(tensors))
        return tuple(
            tensor
            for tensor, (least, most) in zip(tensors, ranges)
            if least <= rows and (most is None or rows <= most)
        )

    def mapped(self, tensors: LinearTensors, change: Callable[[Tensor], Tensor]) -> LinearTensors:
        """The tensors with ``change`` applied to each memory once: to count weights, move or drop them."""
        return tuple(map(change, tensors))

    @abstractmethod
    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        """Turn weight [out, in] and bias [out] into what ``kept`` readies for ``apply``;
        the originals are dropped."""

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        """What ``prepare`` gave, in memory for as long as a model lives (see ``WeightMemory``): what a
        checkpoint hands out may lie in its mapped file."""
        return tuple(
            kept_weights.copy(tensor) if tensor.device.type == "cpu" else tensor for tensor in tensors
        )

    @abstractmethod
    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        """x [tokens, in] -> [tokens, out]. A pure function of tensors."""

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        """The first half of what ``apply`` gives, and the second: gate and up of an MLP."""
        first, second = self.apply(x, tensors).chunk(2, dim=-1)
        return first, second

    def apply_part(self, x: Tensor, tensors: LinearTensors, largest: Tensor) -> Tensor:
        """``apply`` to a part of the inputs, where ``scales_tokens``.
        largest: ``largest_inputs`` of all of them."""
        raise NotImplementedError(f"{type(self).__name__} does not round its inputs.")

    def rounded(self, weight: Tensor) -> StoredWeight:
        """The whole weight [out, in] as ``prepare`` would round it, of which a part may then be prepared."""
        return weight

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        """Rows of the weight, as an embedding looks them up: int [n] -> [n, in]. A pure function of tensors.

        Of tensors that are stacked along a first dimension, whole matrices: int [n] -> [n, out, in].
        """
        raise NotImplementedError(f"{type(self).__name__} cannot look up rows.")


def largest_inputs(x: Tensor) -> Tensor:
    """x [tokens, in] -> the largest magnitude of each token's, float32 [tokens, 1]."""
    return x.abs().amax(dim=1, keepdim=True).float()


def with_bias(tensors: LinearTensors, bias: Tensor | None) -> LinearTensors:
    return tensors if bias is None else (*tensors, bias)
