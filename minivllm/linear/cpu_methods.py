"""Linear methods over PyTorch's CPU operators on 8- and 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.quantized_linear import INT4_LANES, int4_linear, int4_rows, int8_linear, int8_rows, pack_int4
from minivllm.linear.layer import LinearMethod, LinearTensors
from minivllm.linear.rounding import round_to_groups, round_to_int8_rows
from minivllm.linear.stored_weight import GroupedWeight, StoredWeight

PREPARED_ELEMENTS = 4_194_304
"""Codes split into two planes at a time."""


@dataclass(frozen=True)
class Int8Linear(LinearMethod):
    """8 bits with one scale per output, of dtype ``dtype`` (that of activations). Tensors: weight, scale, bias."""

    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is never rounded again"
        values, scale = round_to_int8_rows(weight, self.dtype)
        return (values, scale) if bias is None else (values, scale, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_linear(x, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_rows(tensors[0], tensors[1], indices).to(self.dtype)


@dataclass(frozen=True)
class Int4Linear(LinearMethod):
    """Groups of inputs with a scale and an offset each, through the 4-bit operator. Tensors: packed, scales, bias.

    bits 8 takes two planes of 4 bits, the upper with 16 times the scale: side by side along the inputs they are one
    product, exact where the operator for 8 bits, which knows one scale per output only, would have to round again.
    dtype: that of activations, to which scales and zeros are rounded once.
    """

    out_features: int
    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = round_to_groups(weight, self.group_size, self.dtype) if isinstance(weight, Tensor) else weight
        assert isinstance(grouped, GroupedWeight)
        if grouped.group_size != self.group_size:
            grouped = grouped.in_groups_of(self.group_size)
        scale, zero = grouped.scale, grouped.offset + 8 * grouped.scale
        if self.bits == 8:
            # The same rounded scale for both planes: 16 times as much is exact, so values stay multiples of it.
            scale, zero = torch.cat([16 * scale, scale], 1), torch.cat([grouped.offset + 128 * scale, 8 * scale], 1)
        rows, inputs = grouped.codes.shape
        padding = -rows % INT4_LANES
        packed = torch.empty(rows + padding, scale.shape[1] * self.group_size // 2, dtype=torch.uint8)
        step = max(INT4_LANES, PREPARED_ELEMENTS // inputs // INT4_LANES * INT4_LANES)
        for first in range(0, rows, step):
            codes = grouped.codes[first : first + step]
            codes = torch.cat([codes >> 4, codes & 15], dim=1) if self.bits == 8 else codes
            piece = pack_int4(F.pad(codes, (0, 0, 0, -codes.shape[0] % INT4_LANES)))
            packed[first : first + piece.shape[0]] = piece
        scale_and_zero = F.pad(torch.stack([scale.T, zero.T], dim=-1).to(self.dtype), (0, 0, 0, padding))
        tensors = (packed, scale_and_zero.contiguous())
        return tensors if bias is None else (*tensors, F.pad(bias, (0, padding)))

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        planes = torch.cat([x, x], dim=1) if self.bits == 8 else x
        out = int4_linear(planes, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, self.group_size)
        return out if self.out_features % INT4_LANES == 0 else out[:, : self.out_features]

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        rows = int4_rows(tensors[0], tensors[1], indices, self.group_size)
        if self.bits == 8:
            upper, lower = rows.chunk(2, dim=1)
            rows = upper + lower
        return rows.to(self.dtype)
