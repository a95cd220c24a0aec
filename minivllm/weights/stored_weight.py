"""Weights as quantised checkpoints hold them, whatever the file format,
and rounding to fewer bits without data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels_triton_free.packed.int8_tiles import rotate_weight
from minivllm.errors import ModelError

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
    def part(self, rows: slice | Tensor, columns: slice) -> QuantizedWeight:
        """Some rows, a range or indices, and columns: one shard of it."""

    @abstractmethod
    def restore(self, dtype: torch.dtype) -> Tensor:
        """The values [out, in], each rounded once, to ``dtype``."""


@dataclass(frozen=True)
class GroupedWeight(QuantizedWeight):
    """w[o, order[i]] = codes[o, i] * scale[o, g] + offset[o, g], with g = i // group_size.

    codes uint8 [out, in], 0 to 2^bits - 1; scale and offset float32 [out, in / group_size]. order int64 [in]:
    inputs in the order in which they lie here, None where that is their own (GPTQ puts inputs of a similar
    weight into a group). All of GGUF's types that are multiplied as they are, AWQ, GPTQ and
    compressed-tensors' whole numbers are this.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def part(self, rows: slice | Tensor, columns: slice) -> QuantizedWeight:
        size = self.group_size
        start, stop, _ = columns.indices(self.codes.shape[1])
        if self.order is not None and stop - start < self.codes.shape[1]:
            # Any number of inputs of any group may lie in a shard.
            return RestoredWeight(self.part(rows, slice(None)).restore(torch.float32)[:, columns])
        if start % size or stop % size:
            whole = self.in_groups_of(
                next(n for n in range(size, 0, -1) if not (size % n or start % n or stop % n))
            )
            return whole.part(rows, columns)
        groups = slice(start // size, stop // size)
        return replace(
            self,
            codes=self.codes[rows, columns],
            scale=self.scale[rows, groups],
            offset=self.offset[rows, groups],
        )

    def in_groups_of(self, size: int) -> GroupedWeight:
        """The same values in smaller groups, several of which share their scale. size divides group_size."""
        times = self.group_size // size
        return replace(
            self, scale=self.scale.repeat_interleave(times, 1), offset=self.offset.repeat_interleave(times, 1)
        )

    def restore(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for piece in _pieces(self.shape, RESTORED_ELEMENTS):
            codes = self.codes[piece].float().unflatten(1, (-1, self.group_size))
            values = (codes * self.scale[piece, :, None] + self.offset[piece, :, None]).flatten(1)
            if self.order is None:
                out[piece] = values
            else:
                out[piece, self.order] = values.to(dtype)
        return out


@dataclass(frozen=True)
class RowScaledWeight(QuantizedWeight):
    """w[o, i] = values[o, i] * scale[o]: values float8_e4m3fn or int8 [out, in], scale float32 [out, 1].

    rounds_inputs: the layer was made for inputs that are rounded to 8 bits too, with a scale per token.
    """

    values: Tensor
    scale: Tensor
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice | Tensor, columns: slice) -> RowScaledWeight:
        return replace(self, values=self.values[rows, columns], scale=self.scale[rows])

    def restore(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for piece in _pieces(self.shape, RESTORED_ELEMENTS):
            out[piece] = self.values[piece].float() * self.scale[piece]
        return out


@dataclass(frozen=True)
class RestoredWeight(QuantizedWeight):
    """Values [out, in] restored from a format that no operator here multiplies:
    exact, and never quantised again."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice | Tensor, columns: slice) -> RestoredWeight:
        return RestoredWeight(self.values[rows, columns])

    def restore(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


StoredWeight = Tensor | QuantizedWeight
"""A weight as a checkpoint holds it."""


SMALLEST_SHARED_GROUP = 16
"""Groups into which matrices of other group sizes are cut to be stacked:
with less, scales outweigh the codes."""


def stack(parts: Mapping[str, StoredWeight], dtype: torch.dtype) -> StoredWeight:
    """Matrices, by the name of their layer, one below the other.

    Those that cannot share one quantised form are restored to ``dtype`` first. Raises ModelError where only
    some of the layers, or not all in the same way, round their inputs to whole numbers: they share one input.
    """
    weights = list(parts.values())
    if len(weights) == 1:
        return weights[0]
    if all(isinstance(weight, Tensor) for weight in weights):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if len(grouped) == len(weights) and all(
        _same_order(grouped[0].order, weight.order) for weight in grouped
    ):
        sizes = {weight.group_size for weight in grouped}
        size = math.gcd(*sizes)
        if len(sizes) == 1 or size >= SMALLEST_SHARED_GROUP:
            grouped = [
                weight if weight.group_size == size else weight.in_groups_of(size) for weight in grouped
            ]
            return GroupedWeight(
                torch.cat([weight.codes for weight in grouped]),
                torch.cat([weight.scale for weight in grouped]),
                torch.cat([weight.offset for weight in grouped]),
                bits=max(weight.bits for weight in grouped),
                order=grouped[0].order,
            )
    rows = [weight for weight in weights if isinstance(weight, RowScaledWeight)]
    if (
        len(rows) == len(weights)
        and len({(weight.values.dtype, weight.rounds_inputs) for weight in rows}) == 1
    ):
        # Bytes, because PyTorch cannot concatenate float8 everywhere.
        values = torch.cat([weight.values.view(torch.uint8) for weight in rows]).view(rows[0].values.dtype)
        return RowScaledWeight(values, torch.cat([weight.scale for weight in rows]), rows[0].rounds_inputs)
    if any(weight.rounds_inputs and weight.values.dtype == torch.int8 for weight in rows):
        raise ModelError(
            f"{', '.join(parts)} are computed as one product, but the checkpoint rounds the inputs of only "
            "some of "
            f"them to int8, which is not supported: quantise them alike."
        )
    return RestoredWeight(
        torch.cat(
            [weight.to(dtype) if isinstance(weight, Tensor) else weight.restore(dtype) for weight in weights]
        )
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def round_to_int8_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scale [out, 1] of ``dtype``, symmetric: w = values * scale."""
    return round_to_rows(weight, 8, torch.int8, dtype)


def round_to_rows(
    weight: Tensor, bits: int, values_dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> whole numbers of so many bits [out, in] and scale [out, 1], symmetric:
    w = values * scale."""
    values, largest = torch.empty(weight.shape, dtype=values_dtype, device=weight.device), 2 ** (bits - 1) - 1
    # The scale is rounded first, so that values make up for it. That of a row of zeros may be anything but 0.
    scale = (_largest(weight) / largest).clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)
    for piece in _pieces(weight.shape, ROUNDED_ELEMENTS):
        values[piece] = (weight[piece].float() / scale[piece].float()).round_().clamp_(-largest, largest)
    return values, scale


def round_groups_to_rows(
    weight: QuantizedWeight, bits: int, values_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``round_to_rows``, with scales of float32, of what a weight in groups restores to,
    which is not written down.

    (code * scale + offset) / s is code * (scale / s) + offset / s, and of the values only the least and the
    largest of each group are needed before. SmolLM2-135M in 4 bits was loaded in 1.9 seconds in place of 2.2
    (two cores of Zen 3).
    """
    if not isinstance(weight, GroupedWeight) or weight.order is not None:
        return round_to_rows(weight.restore(torch.float32), bits, values_dtype, torch.float32)
    values, largest = (
        torch.empty(weight.shape, dtype=values_dtype, device=weight.codes.device),
        2 ** (bits - 1) - 1,
    )
    scale = torch.empty(len(values), 1, device=values.device)
    for piece in _pieces(weight.shape, RESTORED_ELEMENTS):
        codes = weight.codes[piece].unflatten(1, (-1, weight.group_size))
        own, offset = weight.scale[piece], weight.offset[piece]
        extremes = torch.stack([(code * own + offset).abs() for code in codes.aminmax(dim=-1)])
        rows = scale[piece] = (extremes.amax((0, 2)).unsqueeze(1) / largest).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        numbers = codes.float()
        torch.addcmul((offset / rows).unsqueeze(-1), numbers, (own / rows).unsqueeze(-1), out=numbers)
        values[piece] = numbers.round_().clamp_(-largest, largest).flatten(1)
    return values, scale


def round_rotated_rows(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scale float32 [out, 1] of what ``rotate_weight`` makes of it."""
    values, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0], 1)
    for piece in _pieces(weight.shape, RESTORED_ELEMENTS):
        part = rotate_weight(weight.part(piece, slice(None)).restore(torch.float32))
        values[piece], scale[piece] = round_to_int8_rows(part, torch.float32)
    return values, scale


def round_to_float8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn [out, in] and scale float32 [out, 1]: w = values * scale."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = (_largest(weight) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    for piece in _pieces(weight.shape, ROUNDED_ELEMENTS):
        values[piece] = (
            (weight[piece].float() / scale[piece]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(values.dtype)
        )
    return values, scale


def round_to_groups(weight: Tensor, group_size: int, dtype: torch.dtype) -> GroupedWeight:
    """weight [out, in] in 4 bits: every group of inputs has its smallest weight as code 0 and its largest as
    15.

    scale, and the value of code 8 (the "zero" of the 4-bit operator),
    become numbers of ``dtype`` before codes are chosen.
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


def in_groups(weight: StoredWeight, group_size: int, dtype: torch.dtype) -> GroupedWeight:
    grouped = round_to_groups(weight, group_size, dtype) if isinstance(weight, Tensor) else weight
    assert isinstance(grouped, GroupedWeight)
    return grouped if grouped.group_size == group_size else grouped.in_groups_of(group_size)
