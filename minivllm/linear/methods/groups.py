"""Groups for GPUs, and groups whose inputs lie in another order or are too few for a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import single_row_sums, sums_single_row
from minivllm.linear.methods.method import LinearMethod, LinearTensors, with_bias
from minivllm.weights.stored_weight import GroupedWeight, StoredWeight, in_groups


@dataclass(frozen=True)
class DequantizedGroupLinear(LinearMethod):
    """Groups of inputs with a scale and an offset each, for GPUs. Tensors: codes, scale, offset, bias.

    bits 4 stores two codes per byte:
    inputs i and i + in / 2 share byte i, so that unpacking is two contiguous halves.
    """

    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        codes = grouped.codes
        if self.bits == 4:
            first, second = codes.chunk(2, dim=1)
            codes = second << 4 | first
        return with_bias((codes, grouped.scale.to(self.dtype), grouped.offset.to(self.dtype)), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        codes, scale, offset, *bias = tensors
        is_whole = codes.shape[1] % self.group_size == 0  # no group has inputs in both halves
        if not sums_single_row(x) or not is_whole:
            return F.linear(x, self._restore(codes, scale, offset), bias[0] if bias else None)
        halves = [codes & 15, codes >> 4] if self.bits == 4 else [codes]
        scales, offsets = (tensor.chunk(len(halves), dim=1) for tensor in (scale, offset))
        weights = [self._in_floats(*one) for one in zip(halves, scales, offsets)]
        out = single_row_sums(x.chunk(len(halves), dim=1), weights)
        return (out + bias[0] if bias else out).to(x.dtype)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        codes, scale, offset = (tensor[indices] for tensor in tensors[:3])
        return self._restore(codes, scale, offset)

    def _restore(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        return self._in_floats(codes, scale, offset).to(self.dtype)

    def _in_floats(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """float32 [rows, in], of one code per byte."""
        groups = codes.float().unflatten(-1, (-1, self.group_size))
        return (groups * scale.unsqueeze(-1).float() + offset.unsqueeze(-1).float()).flatten(-2)


@dataclass(frozen=True)
class OrderedInputs(LinearMethod):
    """A weight whose inputs lie in another order. method: multiplies them so.
    Tensors: the order, the method's own."""

    method: LinearMethod

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, GroupedWeight) and weight.order is not None
        return (weight.order, *self.method.prepare(replace(weight, order=None), bias))

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.apply(x[:, tensors[0]], tensors[1:])


@dataclass(frozen=True)
class SpreadGroups(LinearMethod):
    """Groups of ``size`` inputs for a method whose smallest are of ``wide`` ones:
    zeros fill up the inputs of a group.

    Exact, for twice the bytes of the codes where size is half of wide.
    """

    method: LinearMethod
    size: int
    wide: int
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, GroupedWeight) and weight.group_size == self.size
        return self.method.prepare(replace(weight, codes=self._spread(weight.codes)), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.apply(self._spread(x), tensors)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.rows(indices, tensors).unflatten(1, (-1, self.wide))[:, :, : self.size].flatten(1)

    def _spread(self, values: Tensor) -> Tensor:
        """[n, in] -> [n, in / size * wide]."""
        return F.pad(values.unflatten(1, (-1, self.size)), (0, self.wide - self.size)).flatten(1)
