"""Rounding weights to fewer bits: to the nearest, without data."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.linear.stored_weight import GroupedWeight

ROUNDED_ELEMENTS = 4_194_304
"""Weights turned into float32 at a time."""
FLOAT8_MAX = 448.0


def round_to_int8_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scale [out, 1] of ``dtype``, symmetric: w = values * scale."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    # The scale is rounded first, so that values make up for it. That of a row of zeros may be anything but 0.
    scale = (_largest(weight) / 127).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    for piece in _pieces(weight):
        values[piece] = (weight[piece].float() / scale[piece].float()).round_().clamp_(-127, 127)
    return values, scale


def round_to_float8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn [out, in] and scale float32 [out, 1]: w = values * scale."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = (_largest(weight) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    for piece in _pieces(weight):
        values[piece] = (weight[piece].float() / scale[piece]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(values.dtype)
    return values, scale


def round_to_groups(weight: Tensor, group_size: int, dtype: torch.dtype) -> GroupedWeight:
    """weight [out, in] in 4 bits: every group of inputs has its smallest weight as code 0 and its largest as 15.

    scale, and the value of code 8 (the "zero" of the 4-bit operator), become numbers of ``dtype`` before codes are
    chosen.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    shape = (weight.shape[0], weight.shape[1] // group_size)
    scale, offset = (torch.empty(shape, device=weight.device) for _ in range(2))
    for piece in _pieces(weight):
        groups = weight[piece].float().unflatten(1, (-1, group_size))
        low, high = groups.aminmax(dim=-1)
        step = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
        zero = (low + 8 * step).to(dtype).float()
        scale[piece], offset[piece] = step, zero - 8 * step
        steps = (groups - zero.unsqueeze(-1)) / step.unsqueeze(-1) + 8
        codes[piece] = steps.round_().clamp_(0, 15).flatten(1).to(torch.uint8)
    return GroupedWeight(codes, scale, offset, bits=4)


def _largest(weight: Tensor) -> Tensor:
    """Largest magnitude of each row, float32 [out, 1]."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    return torch.maximum(-low.float(), high.float())


def _pieces(weight: Tensor) -> list[slice]:
    rows = max(1, ROUNDED_ELEMENTS // weight.shape[1])
    return [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]
