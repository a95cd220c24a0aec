"""Groups of 4 or 8 bits by PyTorch's operator for CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.quantized_linear import INT4_LANES, int4_linear, int4_rows, pack_int4
from minivllm.linear.methods.method import LinearMethod, LinearTensors, with_bias
from minivllm.weights.stored_weight import GroupedWeight, StoredWeight, in_groups, round_to_groups

PREPARED_ELEMENTS = 4_194_304
"""Codes split into two planes at a time."""


@dataclass(frozen=True)
class Int4Linear(LinearMethod):
    """Groups of inputs with a scale and an offset each, by the CPU's 4-bit operator.
    Tensors: packed, scales, bias.

    bits 8 takes two planes of 4 bits, the upper with 16 times the scale: side by side along the inputs they
    are one product, exact where the operator for 8 bits, which knows one scale per output only, would have to
    round again. dtype: that of activations, to which scales and zeros are rounded once.
    """

    out_features: int
    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def rounded(self, weight: Tensor) -> StoredWeight:
        return round_to_groups(weight, self.group_size, self.dtype)

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        packed, scale_and_zero = self._for_operator(grouped.codes, self._scales(grouped))
        padding = packed.shape[0] - self.out_features
        return with_bias((packed, scale_and_zero), None if bias is None else F.pad(bias, (0, padding)))

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        out = int4_linear(
            self._for_planes(x),
            tensors[0],
            tensors[1],
            tensors[2] if len(tensors) > 2 else None,
            self.group_size,
        )
        return out if self.out_features % INT4_LANES == 0 else out[:, : self.out_features]

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        rows = int4_rows(tensors[0], tensors[1], indices, self.group_size)
        if self.bits == 8:
            upper, lower = rows.chunk(2, dim=1)
            rows = upper + lower
        return rows.to(self.dtype)

    def without_tiles(self) -> Int4Linear:
        """This, as code that is not compiled computes it."""
        return Int4Linear(self.out_features, self.group_size, self.bits, self.dtype)

    def _scales(self, grouped: GroupedWeight) -> Tensor:
        """[groups, out, 2]: scale, and the value of the code in the middle."""
        zero = grouped.offset + 2 ** (self.bits - 1) * grouped.scale
        return torch.stack([grouped.scale.T, zero.T], dim=-1).to(self.dtype)

    def _for_operator(self, codes: Tensor, scale_and_zero: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [out, in] and their scales in the order that the operator wants."""
        rows, inputs = codes.shape
        scale_and_zero = self._scales_of_planes(scale_and_zero)
        padding = -rows % INT4_LANES
        packed = torch.empty(
            rows + padding, scale_and_zero.shape[0] * self.group_size // 2, dtype=torch.uint8
        )
        step = max(INT4_LANES, PREPARED_ELEMENTS // inputs // INT4_LANES * INT4_LANES)
        for first in range(0, rows, step):
            planes = self._in_planes(codes[first : first + step])
            piece = pack_int4(F.pad(planes, (0, 0, 0, -planes.shape[0] % INT4_LANES)))
            packed[first : first + piece.shape[0]] = piece
        return packed, F.pad(scale_and_zero, (0, 0, 0, padding)).contiguous()

    def _in_planes(self, codes: Tensor) -> Tensor:
        """Codes of 4 bits: [out, in], or the upper and the lower ones of 8 bits, [out, 2 * in]."""
        return torch.cat([codes >> 4, codes & 15], dim=1) if self.bits == 8 else codes

    def _scales_of_planes(self, scale_and_zero: Tensor) -> Tensor:
        """Their scales: 16 times as much is exact,
        so what two planes add up to is the code times its scale."""
        if self.bits == 4:
            return scale_and_zero
        scale, zero = scale_and_zero.unbind(-1)
        return torch.cat([torch.stack([16 * scale, zero], -1), torch.stack([scale, 8 * scale], -1)])

    def _for_planes(self, x: Tensor) -> Tensor:
        """The inputs that they meet."""
        return torch.cat([x, x], dim=1) if self.bits == 8 else x
