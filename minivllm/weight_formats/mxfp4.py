"""MXFP4 (OCP Microscaling Formats 1.0): floats of 4 bits, 32 of which share a power of two; gpt-oss stores experts so.

blocks uint8 [..., groups, 16]: two floats in a byte, the first in its lower half; scales uint8 [..., groups]: the
exponent plus 127. A float has 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.linear.stored_weight import GroupedWeight

GROUP = 32
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LARGEST = 12


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., groups * 32] in ``dtype``: exact in every type whose exponents reach so far."""
    values = torch.tensor(_DOUBLED, dtype=dtype, device=blocks.device) / 2
    numbers = values[_codes(blocks).int()].unflatten(-1, (-1, GROUP))
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2)


def group_mxfp4(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """The same as whole numbers of 8 bits, which existing methods multiply exactly; experts lie one below the other.

    blocks [..., out, groups, 16] become one matrix [... * out, groups * 32]. Twice a float of 4 bits is a whole number
    from -12 to 12, so a code is that plus 12, and its scale is half of the group's.
    """
    codes = torch.tensor([number + _LARGEST for number in _DOUBLED], dtype=torch.uint8, device=blocks.device)
    scale = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - 128).flatten(0, -2)
    return GroupedWeight(codes[_codes(blocks).flatten(0, -2).int()], scale, -_LARGEST * scale, bits=8)


def _codes(blocks: Tensor) -> Tensor:
    """uint8 [..., groups, 16] -> codes uint8 [..., groups * 32]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3)
