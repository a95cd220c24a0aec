"""float8 for GPUs that multiply it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.linear.methods.method import LinearMethod, LinearTensors, with_bias
from minivllm.weights.stored_weight import FLOAT8_MAX, RowScaledWeight, StoredWeight, round_to_float8_rows


@dataclass(frozen=True)
class Float8Linear(LinearMethod):
    """float8_e4m3 weights with a scale per output, and activations with a scale per token,
    multiplied as float8.

    Tensors: weight [in, out] (a transposed view), scale [1, out], bias.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        if isinstance(weight, RowScaledWeight):
            values, scale = weight.values, weight.scale
        else:
            assert isinstance(weight, Tensor)
            values, scale = round_to_float8_rows(weight)
        # The operator wants the second matrix with its columns side by side in memory.
        return with_bias((values.contiguous().t(), scale.t().contiguous()), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        x_scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / FLOAT8_MAX
        values = (x.float() / x_scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(values, tensors[0], scale_a=x_scale, scale_b=tensors[1], out_dtype=x.dtype)
        return out if len(tensors) == 2 else out + tensors[2]
