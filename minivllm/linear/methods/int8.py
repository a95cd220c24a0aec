"""8 bits with one scale per output, and inputs of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import single_row_sums, sums_single_row
from kernels_triton_free.packed.whole_numbers import WholeNumbers, parts_of, whole_numbers_linear
from kernels_triton_free.quantized_linear import int8_linear, int8_rows
from minivllm.linear.methods.method import LinearMethod, LinearTensors, largest_inputs, with_bias
from minivllm.weights.stored_weight import RowScaledWeight, StoredWeight, round_to_int8_rows


@dataclass(frozen=True)
class Int8Linear(LinearMethod):
    """8 bits with one scale per output, through the CPU's operator. dtype: of activations and scales."""

    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def rounded(self, weight: Tensor) -> StoredWeight:
        values, scale = round_to_int8_rows(weight, self.dtype)
        return RowScaledWeight(values, scale.float())

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        if isinstance(weight, RowScaledWeight):
            return with_bias((weight.values.contiguous(), weight.scale.to(self.dtype)), bias)
        assert isinstance(weight, Tensor), "a quantised weight is never rounded again"
        return with_bias(round_to_int8_rows(weight, self.dtype), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_linear(x, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_rows(tensors[0], tensors[1], indices).to(self.dtype)


class WholeInt8Linear(Int8Linear):
    """The same where compiled code multiplies whole numbers (see
    ``kernels_triton_free.packed.whole_numbers``): inputs are rounded to 14 bits or more. For CPUs with AVX2
    and no more."""

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().apply(x, tensors)
        values, scale, *bias = tensors
        scales = scale.float().view(1, -1).expand(len(parts_of(values.shape[1])), -1)
        return whole_numbers_linear(x, WholeNumbers(values, scales), *bias)


class DequantizedInt8Linear(Int8Linear):
    """The same for GPUs: the scale is applied to the product."""

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        if sums_single_row(x):
            out = (single_row_sums([x], [tensors[0]]) * tensors[1].view(-1)).to(x.dtype)
        else:
            out = F.linear(x, tensors[0].to(x.dtype)) * tensors[1].view(-1)
        return out if len(tensors) == 2 else out + tensors[2]


@dataclass(frozen=True)
class RoundedInputs(LinearMethod):
    """Inputs of 8 bits: whole numbers with a scale per token, found as the tokens come,
    as compressed-tensors does it.

    The scale is the largest magnitude / 127.5, a number is round(x / scale) within -128 to 127. method:
    multiplies the numbers with an int8 weight; products of such numbers are exact in every dtype. Tensors:
    the method's two, bias.
    """

    method: Int8Linear
    scales_tokens: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        return with_bias(self.method.prepare(weight, None), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.apply_part(x, tensors, largest_inputs(x))

    def apply_part(self, x: Tensor, tensors: LinearTensors, largest: Tensor) -> Tensor:
        scale = largest / 127.5
        scale = torch.where(scale == 0, 1.0, scale)
        numbers = (x.float() / scale).round().clamp(-128, 127)
        # Moved by a power of two, so that sums of float16 do not overflow.
        out = self.method.apply((numbers / 128).to(x.dtype), tensors[:2]).float() * (128 * scale)
        return (out if len(tensors) == 2 else out + tensors[2].float()).to(x.dtype)
