"""Top-k and top-p without a sort: the last value that is kept, found bit by bit.

Floats have the order of their bits read as integers, once those of negative ones are turned round: their keys. The
k-th largest of a row is the greatest key that at least k keys reach. Top-p keeps what reaches the greatest key that
enough probability reaches. Either is found bit by bit: each loop over the row compares with seven keys, which settles
three bits. (Radix selection: Alabi et al. 2012.)

A sort moves all values many times. The few candidates that replace it on a CPU may turn out to be too few, and the host
must wait to hear so. Here the loops are always as many: six for bfloat16, eleven for float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BITS_AT_ONCE = 3


def sortable(values: Tensor) -> Tensor:
    """Keys int32 in the order of values, float of 2 or 4 bytes; NaN comes first, beside -inf."""
    values = torch.where(values.isnan(), -torch.inf, values)
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32).to(torch.int32)
    return torch.where(bits < 0, bits ^ _turned(values.dtype), bits)


def unsorted(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of this dtype whose keys these int32 are."""
    bits = torch.where(keys < 0, keys ^ _turned(dtype), keys)
    return bits.to(torch.int16 if dtype.itemsize == 2 else torch.int32).view(dtype)


def _turned(dtype: torch.dtype) -> int:
    """All bits but the sign."""
    return 0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF


def greatest_key(keys: Tensor, num_bits: int, is_enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The greatest key c such that the keys of its row that reach it are enough, int32 [R].

    keys int32 [R, V], signed, of so many bits. is_enough: bool [R, V] (which of them reach c) -> bool [R]; true for the
    smallest key of all, and false from some key on.
    """
    zero = torch.zeros_like(keys[:, 0])
    found = torch.where(is_enough(keys >= zero[:, None]), zero, -(2 ** (num_bits - 1)))
    left = num_bits - 1
    while left > 0:
        taken = min(_BITS_AT_ONCE, left)
        left -= taken
        tried = [found + (digit << left) for digit in range(1, 1 << taken)]
        # Whoever reaches a key reaches all smaller ones: how many were enough is the digit.
        digit = torch.stack([is_enough(keys >= key[:, None]) for key in tried]).sum(0, dtype=torch.int32)
        found = found + (digit << left)
    return found
