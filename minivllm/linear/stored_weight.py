"""Weights as quantised checkpoints hold them, whatever the file format, and rounding to fewer bits without data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESTORED_ELEMENTS, ROUNDED_ELEMENTS = 1_048_576, 4_194_304
"""Weights turned into float32 at a time, where they are restored and where they are rounded."""
FLOAT8_MAX = 448.0


def _pieces(shape: tuple[int, ...], elements: int) -> list[slice]:
    """Rows of a matrix [out, in] by so many elements at a time."""
    rows = max(1, elements // shape[1])
    return [slice(first, first + rows) for first in range(0, shape[0], rows)]


class QuantizedWeight(ABC):
    """A weight [out, in] that is quantised already: nothing here may round it to other values."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @abstractmethod
    def part(self, rows: slice, columns: slice) -> QuantizedWeight:
        """Some rows and columns: one shard of it."""

    @abstractmethod
    def restore(self, dtype: torch.dtype) -> Tensor:
        """The values [out, in], each rounded once, to ``dtype``."""


@dataclass(frozen=True)
class GroupedWeight(QuantizedWeight):
    """w[o, i] = codes[o, i] * scale[o, g] + offset[o, g], with g = i // group_size.

    codes uint8 [out, in], 0 to 2^bits - 1; scale and offset float32 [out, in / group_size]. GGUF's Q4_0, Q4_1, Q4_K, Q5
    and Q8_0, AWQ and GPTQ all are this.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def part(self, rows: slice, columns: slice) -> GroupedWeight:
        size = self.group_size
        start, stop, _ = columns.indices(self.codes.shape[1])
        if start % size or stop % size:
            whole = self.in_groups_of(next(n for n in range(size, 0, -1) if not (size % n or start % n or stop % n)))
            return whole.part(rows, columns)
        groups = slice(start // size, stop // size)
        return GroupedWeight(
            self.codes[rows, columns], self.scale[rows, groups], self.offset[rows, groups], bits=self.bits
        )

    def in_groups_of(self, size: int) -> GroupedWeight:
        """The same values in smaller groups, several of which share their scale. size divides group_size."""
        times = self.group_size // size
        return GroupedWeight(
            self.codes, self.scale.repeat_interleave(times, 1), self.offset.repeat_interleave(times, 1), bits=self.bits
        )

    def restore(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for piece in _pieces(self.shape, RESTORED_ELEMENTS):
            codes = self.codes[piece].float().unflatten(1, (-1, self.group_size))
            out[piece] = (codes * self.scale[piece, :, None] + self.offset[piece, :, None]).flatten(1)
        return out


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """w[o, i] = values[o, i] * scale[o]: values float8_e4m3fn [out, in], scale float32 [out, 1]."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice, columns: slice) -> Float8Weight:
        return Float8Weight(self.values[rows, columns], self.scale[rows])

    def restore(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for piece in _pieces(self.shape, RESTORED_ELEMENTS):
            out[piece] = self.values[piece].float() * self.scale[piece]
        return out


@dataclass(frozen=True)
class RestoredWeight(QuantizedWeight):
    """Values [out, in] restored from a format that no operator here multiplies: exact, and never quantised again."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice, columns: slice) -> RestoredWeight:
        return RestoredWeight(self.values[rows, columns])

    def restore(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


StoredWeight = Tensor | QuantizedWeight
"""A weight as a checkpoint holds it."""


def stack(parts: Sequence[StoredWeight], dtype: torch.dtype) -> StoredWeight:
    """Matrices one below the other. Those that cannot share one quantised form are restored to ``dtype`` first."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts) and len({part.group_size for part in grouped}) == 1:
        return GroupedWeight(
            torch.cat([part.codes for part in grouped]),
            torch.cat([part.scale for part in grouped]),
            torch.cat([part.offset for part in grouped]),
            bits=max(part.bits for part in grouped),
        )
    eights = [part for part in parts if isinstance(part, Float8Weight)]
    if len(eights) == len(parts):
        # Bytes, because PyTorch cannot concatenate float8 everywhere.
        values = torch.cat([part.values.view(torch.uint8) for part in eights]).view(torch.float8_e4m3fn)
        return Float8Weight(values, torch.cat([part.scale for part in eights]))
    return RestoredWeight(
        torch.cat([part.to(dtype) if isinstance(part, Tensor) else part.restore(dtype) for part in parts])
    )


def round_to_int8_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scale [out, 1] of ``dtype``, symmetric: w = values * scale."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    # The scale is rounded first, so that values make up for it. That of a row of zeros may be anything but 0.
    scale = (_largest(weight) / 127).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    for piece in _pieces(weight.shape, ROUNDED_ELEMENTS):
        values[piece] = (weight[piece].float() / scale[piece].float()).round_().clamp_(-127, 127)
    return values, scale


def round_to_float8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn [out, in] and scale float32 [out, 1]: w = values * scale."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = (_largest(weight) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    for piece in _pieces(weight.shape, ROUNDED_ELEMENTS):
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
    for piece in _pieces(weight.shape, ROUNDED_ELEMENTS):
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
