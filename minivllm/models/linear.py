"""Linear layers that know which shard of a checkpoint's weights is theirs, and how their product is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear
from kernels_triton_free.lora import add_low_rank

LinearTensors = tuple[Tensor, ...]
"""What a linear layer passes to its method: the prepared weight and whatever else the method needs."""


@dataclass(frozen=True)
class Shard:
    """This worker's share of every parallel layer: part ``rank`` of ``size`` equal parts."""

    rank: int = 0
    size: int = 1


class LinearMethod(ABC):
    """How a linear layer stores its weight and computes its product. Quantisation plugs in here.

    Methods are immutable and compare by value: layers with equal methods share one compiled region.
    """

    @abstractmethod
    def prepare(self, weight: Tensor, bias: Tensor | None) -> LinearTensors:
        """Turn weight [out, in] and bias [out] into what apply needs; the originals are dropped."""

    @abstractmethod
    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        """x [tokens, in] -> [tokens, out]. A pure function of tensors."""


@dataclass(frozen=True)
class PlainLinear(LinearMethod):
    """The weight as it is."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> LinearTensors:
        return (weight,) if bias is None else (weight, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return linear(x, *tensors)


@dataclass(frozen=True)
class PackedLinear(LinearMethod):
    """The weight packed for this CPU by oneDNN."""

    out_features: int

    def prepare(self, weight: Tensor, bias: Tensor | None) -> LinearTensors:
        packed = pack_weight(weight)
        return (packed,) if bias is None else (packed, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return packed_linear(x, tensors[0], tensors[1] if len(tensors) > 1 else None, self.out_features)


def choose_linear_method(out_features: int, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The fastest exact method for unquantised weights on this device."""
    if device.type == "cpu" and can_pack(dtype):
        return PackedLinear(out_features)
    return PlainLinear()


class Linear:
    """One product of the decoder, possibly of several checkpoint matrices stacked along the output (q, k, v).

    parts: output features of each stacked matrix, whole model. split: "column" divides the outputs of every part
    among the shards, "row" divides the inputs (the sum over shards is the product).
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
    ) -> None:
        self.split, self.shard, self.device = split, shard, device
        self.sizes = {name: size // shard.size if split == "column" else size for name, size in parts.items()}
        self.in_features = in_features // shard.size if split == "row" else in_features
        self.out_features = sum(self.sizes.values())
        self.method = choose_linear_method(self.out_features, dtype, device)
        self.tensors: LinearTensors = ()
        self.adapters: LinearTensors = ()
        self._dtype, self._has_bias = dtype, bias
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._missing = {(name, kind) for name in parts for kind in (("weight", "bias") if bias else ("weight",))}

    def whole_shape(self, part: str) -> tuple[int, int]:
        """[out, in] of a part in the whole model."""
        if self.split == "column":
            return self.sizes[part] * self.shard.size, self.in_features
        return self.sizes[part], self.in_features * self.shard.size

    @property
    def arguments(self) -> LinearTensors:
        """Everything ``apply`` reads of this layer; layers of one shape share the region that reads it."""
        return (*self.tensors, *self.adapters)

    def apply(self, x: Tensor, arguments: LinearTensors, lora_slots: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out], with the arguments of any layer of this shape.

        lora_slots int32 [tokens]: adapter of each token, for layers with ``adapters`` (A and B of add_low_rank), which
        are the last two arguments; None for layers without.
        """
        if lora_slots is None:
            return self.method.apply(x, arguments)
        *tensors, a, b = arguments
        out = self.method.apply(x, tuple(tensors))
        return add_low_rank(out, x, a, b, lora_slots, tuple(self.sizes.values()))

    def load(self, part: str, kind: str, tensor: Tensor) -> None:
        """Take this worker's shard of a checkpoint tensor: kind "weight" [out, in] or "bias" [out] of one part."""
        if self._weight is None:
            self._weight = torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self.device)
            self._bias = torch.empty(self.out_features, dtype=self._dtype, device=self.device)
        start = 0
        for name, size in self.sizes.items():
            if name == part:
                break
            start += size
        rank = self.shard.rank
        size = self.sizes[part]
        if kind == "weight":
            columns = slice(rank * self.in_features, (rank + 1) * self.in_features)
            own = tensor[:, columns] if self.split == "row" else tensor[rank * size : (rank + 1) * size]
            self._weight[start : start + size] = own
        else:
            assert self._bias is not None
            # A row-split product is summed over shards, so only one of them may add the bias.
            own = tensor if self.split == "row" else tensor[rank * size : (rank + 1) * size]
            self._bias[start : start + size] = own if self.split == "column" or rank == 0 else 0
        self._missing.remove((part, kind))
        if not self._missing:
            self.tensors = self.method.prepare(self._weight, self._bias if self._has_bias else None)
            self._weight = self._bias = None
