"""Top-k and top-p without a sort: the last value that is kept, found bit by bit.

Floats have the order of their bits read as integers, once those of negative ones are turned round: their
keys. The k-th largest of a row is the greatest key that at least k keys reach. Top-p keeps what reaches the
greatest key that enough probability reaches. Either is found two bits at a time: a loop over the row compares
with three keys, and how many of them were reached by enough is the next digit. (Radix selection: Alabi et al.
2012.)

A sort moves all values many times. The few candidates that replace it on a CPU may turn out to be too few,
and the host must wait to hear so. Here the loops are always as many: eight for bfloat16, sixteen for float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BITS_AT_ONCE = 2


def sortable(values: Tensor) -> Tensor:
    """Keys in the order of values, which are floats of 2 or 4 bytes: integers as wide.
    NaN has the key of -inf."""
    values = torch.where(values.isnan(), -torch.inf, values)
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def unsorted(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of this dtype that have these keys."""
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype)


def greatest_key(keys: Tensor, is_enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The greatest key c such that the keys of its row that reach it are enough;
    [R], of the dtype of keys [R, V].

    is_enough: bool [R, V] (which of them reach c) -> bool [R];
    true for the smallest key of all, and false from some key on.
    """
    limits = torch.iinfo(keys.dtype)
    found = torch.full_like(keys[:, 0], limits.min, dtype=torch.int64)
    for shift in range(limits.bits - _BITS_AT_ONCE, -1, -_BITS_AT_ONCE):
        tried = [(found + (digit << shift)).to(keys.dtype) for digit in range(1, 2**_BITS_AT_ONCE)]
        digit = sum(is_enough(keys >= key[:, None]).to(torch.int64) for key in tried)
        found = found + (digit << shift)
    return found.to(keys.dtype)
