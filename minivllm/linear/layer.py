"""Linear layers that know which shard of a checkpoint's weights is theirs, and how their product is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear
from kernels_triton_free.lora import RowAdapters, add_low_rank
from kernels_triton_free.packed.memory import moved
from kernels_triton_free.packed.rows import MAX_ROWS, few_rows_linear, has_few_rows, is_readable, words_of
from kernels_triton_free.packed.tiles import (
    can_halve,
    can_tile,
    most_rows_by_words,
    tiled_linear,
    tiled_linear_halves,
    tiles_of,
    words_in,
)
from minivllm.device.memory import WeightMemory
from minivllm.distributed.shard import Rows, Shard, count_rows
from minivllm.linear.stored_weight import QuantizedWeight, StoredWeight, stack

LinearTensors = tuple[Tensor, ...]
"""What a linear layer passes to its method: the prepared weight and whatever else the method needs."""

_weights = WeightMemory()


class LinearMethod(ABC):
    """How a linear layer stores its weight and computes its product. Quantisation plugs in here.

    Methods are immutable and compare by value: layers with equal methods share one compiled region.
    gathers_rows: whether ``rows`` works, so that a tied embedding needs no second copy of the weight. scales_tokens:
    whether all inputs of a token are rounded by the largest of them, so that workers who divide them have to agree.
    """

    gathers_rows: ClassVar[bool] = False
    scales_tokens: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        """Turn weight [out, in] and bias [out] into what ``kept`` readies for ``apply``; the originals are dropped."""

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        """What ``prepare`` gave, in memory for as long as a model lives; see ``WeightMemory``."""
        return tuple(_weights.copy(tensor) if tensor.device.type == "cpu" else tensor for tensor in tensors)

    @abstractmethod
    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        """x [tokens, in] -> [tokens, out]. A pure function of tensors."""

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        """The first half of what ``apply`` gives, and the second: gate and up of an MLP."""
        first, second = self.apply(x, tensors).chunk(2, dim=-1)
        return first, second

    def apply_part(self, x: Tensor, tensors: LinearTensors, largest: Tensor) -> Tensor:
        """``apply`` to a part of the inputs, where ``scales_tokens``. largest: ``largest_inputs`` of all of them."""
        raise NotImplementedError(f"{type(self).__name__} does not round its inputs.")

    def rounded(self, weight: Tensor) -> StoredWeight:
        """The whole weight [out, in] as ``prepare`` would round it, of which a part may then be prepared."""
        return weight

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        """Rows of the weight, as an embedding looks them up: int [n] -> [n, in]. A pure function of tensors.

        Of tensors that are stacked along a first dimension, whole matrices: int [n] -> [n, out, in].
        """
        raise NotImplementedError(f"{type(self).__name__} cannot look up rows.")


@dataclass(frozen=True)
class PlainLinear(LinearMethod):
    """The weight as it is."""

    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        return (weight,) if bias is None else (weight, bias)

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        return tuple(map(_weights.copy, tensors))  # what a checkpoint hands out may lie in its mapped file

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return linear(x, *tensors)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return tensors[0][indices]


@dataclass(frozen=True)
class PackedLinear(LinearMethod):
    """The weight packed for this CPU by oneDNN.

    read_as: how compiled code reads the memory of the packed weight, which is the second tensor then: as "words" where
    rows are few, as "tiles" where they are more too, or None.
    """

    out_features: int
    read_as: Literal["words", "tiles"] | None = None

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        packed = pack_weight(weight)
        return (packed,) if bias is None else (packed, bias)

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        packed, *bias = tensors
        packed = moved(packed, _weights.copy)
        memory = () if self.read_as is None else (words_of(packed) if self.read_as == "words" else tiles_of(packed),)
        return packed, *memory, *bias

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        packed, *others = tensors
        memory = others.pop(0) if self.read_as else None
        bias = others[0] if others else None
        if memory is not None and torch.compiler.is_compiling():
            if self._reads_words(x):
                return few_rows_linear(x, words_in(memory) if self.read_as == "tiles" else memory, bias)
            if self.read_as == "tiles":
                return tiled_linear(x, memory, bias)
        return packed_linear(x, packed, bias, self.out_features)

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        _, *memory = tensors
        reads_tiles = self.read_as == "tiles" and torch.compiler.is_compiling() and not self._reads_words(x)
        if reads_tiles and len(memory) == 1 and can_halve(memory[0]):
            return tiled_linear_halves(x, memory[0])
        return super().apply_halves(x, tensors)

    def _reads_words(self, x: Tensor) -> bool:
        """Whether compiled code multiplies the rows of x so."""
        return has_few_rows(x, MAX_ROWS if self.read_as == "words" else most_rows_by_words())


def choose_linear_method(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The fastest exact method for unquantised weights [out_features, in_features] on this device."""
    if device.type == "cpu" and can_pack(dtype):
        if can_tile(out_features, in_features):
            return PackedLinear(out_features, "tiles")
        return PackedLinear(out_features, "words" if is_readable(out_features, in_features) else None)
    return PlainLinear()


ChooseMethod = Callable[[str, StoredWeight], LinearMethod | None]
"""(name of the layer, its weight) -> the quantised method to use; None: restore the weight and multiply that."""


def never_quantized(name: str, weight: StoredWeight) -> LinearMethod | None:
    """ChooseMethod of a model without quantisation."""
    return None


class Linear:
    """One product of the decoder, possibly of several checkpoint matrices stacked along the output (q, k, v).

    parts: output features of each stacked matrix, whole model. split: "column" divides the outputs of every part
    among the shards, "row" divides the inputs (the sum over shards is the product). own: this shard's range of the
    outputs of each part, or their indices; of the inputs under the name of the only part. Left out, they are even.
    choose: picks the method once the whole weight is there; until then ``method`` is that of unquantised weights.
    is_stacked: somebody else keeps the tensors, in a stack.
    """

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        bias: bool,
        split: Literal["column", "row"],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        choose: ChooseMethod = never_quantized,
        own: Mapping[str, Rows] | None = None,
        is_stacked: bool = False,
    ) -> None:
        self.split, self.shard, self.device = split, shard, device
        counts = {name: in_features if split == "row" else size for name, size in parts.items()}
        divided: Mapping[str, Any] = own or {name: shard.own(count) for name, count in counts.items()}
        whole = {name: slice(0, size) for name, size in parts.items()}
        self.outputs: Mapping[str, Rows] = divided if split == "column" else whole
        self.inputs: slice = divided[next(iter(parts))] if split == "row" else slice(0, in_features)
        self.sizes = {name: count_rows(self.outputs[name]) for name in parts}
        self.in_features = count_rows(self.inputs)
        self.out_features = sum(self.sizes.values())
        self.method = choose_linear_method(self.out_features, self.in_features, dtype, device)
        self.tensors: LinearTensors = ()
        self.adapters: LinearTensors = ()
        self._whole, self._whole_inputs = parts, in_features
        self._dtype, self._has_bias, self._choose, self._is_stacked = dtype, bias, choose, is_stacked
        self._weights: dict[str, StoredWeight] = {}
        self._biases: dict[str, Tensor] = {}

    def whole_shape(self, part: str) -> tuple[int, int]:
        """[out, in] of a part in the whole model."""
        return self._whole[part], self._whole_inputs

    @property
    def arguments(self) -> LinearTensors:
        """Everything ``apply`` reads of this layer; layers of one shape share the region that reads it."""
        return (*self.tensors, *self.adapters)

    def apply(
        self,
        x: Tensor,
        arguments: LinearTensors,
        adapters: RowAdapters | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, in] -> [tokens, out], with the arguments of any layer of this shape.

        adapters: that of each token, for layers with ``adapters`` (a, b and columns of add_low_rank), which are the
        last three arguments; None for layers without. largest: see LinearMethod.apply_part; None where x is whole.
        """
        tensors = arguments if adapters is None else arguments[:-3]
        out = self.method.apply(x, tensors) if largest is None else self.method.apply_part(x, tensors, largest)
        if adapters is None:
            return out
        a, b, columns = arguments[-3:]
        return add_low_rank(out, x, a, b, columns, adapters, tuple(self.sizes.values()))

    def apply_halves(
        self, x: Tensor, arguments: LinearTensors, adapters: RowAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """``apply``, of two equal parts, each by itself."""
        if adapters is None:
            return self.method.apply_halves(x, arguments)
        first, second = self.apply(x, arguments, adapters).chunk(2, dim=-1)
        return first, second

    def load(self, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take this worker's shard of a checkpoint tensor: kind "weight" [out, in] or "bias" [out] of one part."""
        rows, columns = self.outputs[part], self.inputs
        if kind == "weight":
            # Scales of whole rows are found before the inputs are divided: see ``_finish``.
            is_plain = isinstance(tensor, Tensor)
            self._weights[part] = _part(tensor, rows, slice(0, self._whole_inputs) if is_plain else columns)
        else:
            assert isinstance(tensor, Tensor)
            # A row-split product is summed over shards, so only one of them may add the bias.
            self._biases[part] = (
                torch.zeros_like(tensor) if self.split == "row" and self.shard.rank > 0 else tensor[rows]
            )
        if len(self._weights) == len(self.sizes) and len(self._biases) == (len(self.sizes) if self._has_bias else 0):
            self._finish()

    def _finish(self) -> None:
        """All parts are there: choose the method and prepare its tensors."""
        weight = stack({name: self._weights.pop(name) for name in self.sizes}, self._dtype)
        bias = torch.cat([self._biases.pop(name) for name in self.sizes]) if self._has_bias else None
        method = self._choose("+".join(self.sizes), weight)
        if isinstance(weight, Tensor) and self.in_features < self._whole_inputs:
            weight = _part(weight if method is None else method.rounded(weight), slice(0, len(weight)), self.inputs)
        if method is None:
            if isinstance(weight, QuantizedWeight):
                weight = weight.restore(self._dtype)
            weight = weight.to(self.device, self._dtype)
        else:
            self.method = method
        bias = None if bias is None else bias.to(self.device, self._dtype)
        prepared = tuple(tensor.to(self.device) for tensor in self.method.prepare(weight, bias))
        self.tensors = prepared if self._is_stacked else self.method.kept(prepared)


def largest_inputs(x: Tensor) -> Tensor:
    """x [tokens, in] -> the largest magnitude of each token's, float32 [tokens, 1]."""
    return x.abs().amax(dim=1, keepdim=True).float()


def _part(weight: StoredWeight, rows: Rows, columns: slice) -> StoredWeight:
    return weight.part(rows, columns) if isinstance(weight, QuantizedWeight) else weight[rows, columns]
