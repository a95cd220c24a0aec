"""MXFP4 (OCP Microscaling Formats 1.0): floats of 4 bits, 32 of which share a power of two;
gpt-oss stores experts so.

blocks uint8 [..., groups, 16]: two floats in a byte, the first in its lower half; scales uint8 [..., groups]:
the exponent plus 127. A float has 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the
same negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.weights.stored_weight import GroupedWeight

GROUP = 32
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LARGEST = 12
LOOKED_UP = 4_194_304
"""Floats that become numbers at a time."""


def group_mxfp4(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """Whole numbers of 8 bits, which existing methods multiply exactly; experts lie one below the other.

    blocks [..., out, groups, 16] become one matrix [... * out, groups * 32]. Twice a float of 4 bits is a
    whole number from -12 to 12, so a code is that plus 12, and its scale is half of the group's. Their 25
    values do not fit into the 16 steps of a number of 4 bits, and no operator of PyTorch looks values up, so
    4 bits would have to be restored for every product: 8 bits take twice the memory of the file, and 0.6 of
    that of bfloat16.
    """
    table = torch.tensor([number + _LARGEST for number in _DOUBLED], dtype=torch.uint8, device=blocks.device)
    packed = blocks.flatten(0, -3).flatten(1)
    codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8, device=blocks.device)
    rows = max(1, LOOKED_UP // codes.shape[1])
    for first in range(0, len(packed), rows):
        piece = packed[first : first + rows]
        codes[first : first + rows] = table[torch.stack([piece & 15, piece >> 4], dim=-1).flatten(1).int()]
    scale = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - 128).flatten(0, -2)
    return GroupedWeight(codes, scale, -_LARGEST * scale, bits=8)
