"""Weights as quantised checkpoints hold them, whatever the file format: what linear methods are prepared from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESTORED_ELEMENTS = 1_048_576
"""Weights turned into float32 at a time."""


class QuantizedWeight(ABC):
    """A weight [out, in] that somebody has quantised already: nothing here may round it to other values."""

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
        rows = max(1, RESTORED_ELEMENTS // self.codes.shape[1])
        for first in range(0, self.shape[0], rows):
            piece = slice(first, first + rows)
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
        rows = max(1, RESTORED_ELEMENTS // self.values.shape[1])
        for first in range(0, self.shape[0], rows):
            piece = slice(first, first + rows)
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
