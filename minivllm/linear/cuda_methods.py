"""Linear methods for GPUs: plain PyTorch that Inductor fuses with what is around it, and PyTorch's float8 product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.linear.layer import LinearMethod, LinearTensors
from minivllm.linear.rounding import FLOAT8_MAX, round_to_float8_rows, round_to_groups, round_to_int8_rows
from minivllm.linear.stored_weight import Float8Weight, GroupedWeight, StoredWeight


@dataclass(frozen=True)
class DequantizedInt8Linear(LinearMethod):
    """8 bits with one scale per output, which is applied to the product. Tensors: weight, scale, bias."""

    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is never rounded again"
        values, scale = round_to_int8_rows(weight, self.dtype)
        return (values, scale) if bias is None else (values, scale, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        out = F.linear(x, tensors[0].to(x.dtype)) * tensors[1].view(-1)
        return out if len(tensors) == 2 else out + tensors[2]

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return (tensors[0][indices].float() * tensors[1][indices].float()).to(self.dtype)


@dataclass(frozen=True)
class DequantizedGroupLinear(LinearMethod):
    """Groups of inputs with a scale and an offset each. Tensors: codes, scale, offset, bias.

    bits 4 stores two codes per byte: inputs i and i + in / 2 share byte i, so that unpacking is two contiguous halves.
    """

    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = round_to_groups(weight, self.group_size, self.dtype) if isinstance(weight, Tensor) else weight
        assert isinstance(grouped, GroupedWeight)
        codes = grouped.codes
        if self.bits == 4:
            first, second = codes.chunk(2, dim=1)
            codes = second << 4 | first
        tensors = (codes, grouped.scale.to(self.dtype), grouped.offset.to(self.dtype))
        return tensors if bias is None else (*tensors, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        weight = self._restore(tensors[0], tensors[1], tensors[2])
        return F.linear(x, weight, tensors[3] if len(tensors) > 3 else None)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        codes, scale, offset = (tensor[indices] for tensor in tensors[:3])
        return self._restore(codes, scale, offset)

    def _restore(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=1)
        groups = codes.float().unflatten(1, (-1, self.group_size))
        return (groups * scale.unsqueeze(-1).float() + offset.unsqueeze(-1).float()).flatten(1).to(self.dtype)


@dataclass(frozen=True)
class Float8Linear(LinearMethod):
    """float8_e4m3 weights with a scale per output, and activations with a scale per token, multiplied as float8.

    Tensors: weight [in, out] (a transposed view), scale [1, out], bias.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        if isinstance(weight, Float8Weight):
            values, scale = weight.values, weight.scale
        else:
            assert isinstance(weight, Tensor)
            values, scale = round_to_float8_rows(weight)
        # The operator wants the second matrix with its columns side by side in memory.
        tensors = (values.contiguous().t(), scale.t().contiguous())
        return tensors if bias is None else (*tensors, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        x_scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / FLOAT8_MAX
        values = (x.float() / x_scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(values, tensors[0], scale_a=x_scale, scale_b=tensors[1], out_dtype=x.dtype)
        return out if len(tensors) == 2 else out + tensors[2]
