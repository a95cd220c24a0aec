"""Linear methods over fewer bits: PyTorch's CPU operators, products for GPUs that Inductor fuses, and float8.

None but ``RoundedInt4Linear`` rounds a weight that is quantised already. Tensors of a method: its weight and scales,
then the bias, if there is one.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels_triton_free.packed.code_words import code_words_linear, codes_in, put_in_words, rows_of_words
from kernels_triton_free.packed.int4_tiles import int4_tiled_linear, tile_int4
from kernels_triton_free.packed.int8_tiles import Int8Tiles, int8_tiled_linear, tile_int8
from kernels_triton_free.packed.rows import MAX_ROWS, REGISTER, for_few_rows, for_rows, has_few_rows, has_single_row
from kernels_triton_free.quantized_linear import INT4_LANES, int4_linear, int4_rows, int8_linear, int8_rows, pack_int4
from minivllm.linear.layer import LinearMethod, LinearTensors, PackedLinear, largest_inputs
from minivllm.linear.stored_weight import (
    FLOAT8_MAX,
    GroupedWeight,
    RowScaledWeight,
    StoredWeight,
    round_to_float8_rows,
    round_to_groups,
    round_to_int8_rows,
)

PREPARED_ELEMENTS = 4_194_304
"""Codes split into two planes at a time."""


def _with_bias(tensors: LinearTensors, bias: Tensor | None) -> LinearTensors:
    return tensors if bias is None else (*tensors, bias)


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
            return _with_bias((weight.values.contiguous(), weight.scale.to(self.dtype)), bias)
        assert isinstance(weight, Tensor), "a quantised weight is never rounded again"
        return _with_bias(round_to_int8_rows(weight, self.dtype), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_linear(x, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return int8_rows(tensors[0], tensors[1], indices).to(self.dtype)


class DequantizedInt8Linear(Int8Linear):
    """The same for GPUs: the scale is applied to the product."""

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        out = F.linear(x, tensors[0].to(x.dtype)) * tensors[1].view(-1)
        return out if len(tensors) == 2 else out + tensors[2]


@dataclass(frozen=True)
class RoundedInputs(LinearMethod):
    """Inputs of 8 bits: whole numbers with a scale per token, found as the tokens come, as compressed-tensors does it.

    The scale is the largest magnitude / 127.5, a number is round(x / scale) within -128 to 127. method: multiplies the
    numbers with an int8 weight; products of such numbers are exact in every dtype. Tensors: the method's two, bias.
    """

    method: Int8Linear
    scales_tokens: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        return _with_bias(self.method.prepare(weight, None), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.apply_part(x, tensors, largest_inputs(x))

    def apply_part(self, x: Tensor, tensors: LinearTensors, largest: Tensor) -> Tensor:
        scale = largest / 127.5
        scale = torch.where(scale == 0, 1.0, scale)
        numbers = (x.float() / scale).round().clamp(-128, 127)
        # Moved by a power of two, so that sums of float16 do not overflow.
        out = self.method.apply((numbers / 128).to(x.dtype), tensors[:2]).float() * (128 * scale)
        return (out if len(tensors) == 2 else out + tensors[2].float()).to(x.dtype)


def _in_groups(weight: StoredWeight, group_size: int, dtype: torch.dtype) -> GroupedWeight:
    grouped = round_to_groups(weight, group_size, dtype) if isinstance(weight, Tensor) else weight
    assert isinstance(grouped, GroupedWeight)
    return grouped if grouped.group_size == group_size else grouped.in_groups_of(group_size)


@dataclass(frozen=True)
class Int4Linear(LinearMethod):
    """Groups of inputs with a scale and an offset each, by the CPU's 4-bit operator. Tensors: packed, scales, bias.

    bits 8 takes two planes of 4 bits, the upper with 16 times the scale: side by side along the inputs they are one
    product, exact where the operator for 8 bits, which knows one scale per output only, would have to round again.
    dtype: that of activations, to which scales and zeros are rounded once.
    """

    out_features: int
    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def rounded(self, weight: Tensor) -> StoredWeight:
        return round_to_groups(weight, self.group_size, self.dtype)

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = _in_groups(weight, self.group_size, self.dtype)
        packed, scale_and_zero = self._for_operator(grouped.codes, self._scales(grouped))
        padding = packed.shape[0] - self.out_features
        return _with_bias((packed, scale_and_zero), None if bias is None else F.pad(bias, (0, padding)))

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        out = int4_linear(
            self._for_planes(x), tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, self.group_size
        )
        return out if self.out_features % INT4_LANES == 0 else out[:, : self.out_features]

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        rows = int4_rows(tensors[0], tensors[1], indices, self.group_size)
        if self.bits == 8:
            upper, lower = rows.chunk(2, dim=1)
            rows = upper + lower
        return rows.to(self.dtype)

    def without_tiles(self) -> Int4Linear:
        """This, as code that is not compiled computes it."""
        return Int4Linear(self.out_features, self.group_size, self.bits, self.dtype)

    def _scales(self, grouped: GroupedWeight) -> Tensor:
        """[groups, out, 2]: scale, and the value of the code in the middle."""
        zero = grouped.offset + 2 ** (self.bits - 1) * grouped.scale
        return torch.stack([grouped.scale.T, zero.T], dim=-1).to(self.dtype)

    def _for_operator(self, codes: Tensor, scale_and_zero: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [out, in] and their scales in the order that the operator wants."""
        rows, inputs = codes.shape
        scale_and_zero = self._scales_of_planes(scale_and_zero)
        padding = -rows % INT4_LANES
        packed = torch.empty(rows + padding, scale_and_zero.shape[0] * self.group_size // 2, dtype=torch.uint8)
        step = max(INT4_LANES, PREPARED_ELEMENTS // inputs // INT4_LANES * INT4_LANES)
        for first in range(0, rows, step):
            planes = self._in_planes(codes[first : first + step])
            piece = pack_int4(F.pad(planes, (0, 0, 0, -planes.shape[0] % INT4_LANES)))
            packed[first : first + piece.shape[0]] = piece
        return packed, F.pad(scale_and_zero, (0, 0, 0, padding)).contiguous()

    def _in_planes(self, codes: Tensor) -> Tensor:
        """Codes of 4 bits: [out, in], or the upper and the lower ones of 8 bits, [out, 2 * in]."""
        return torch.cat([codes >> 4, codes & 15], dim=1) if self.bits == 8 else codes

    def _scales_of_planes(self, scale_and_zero: Tensor) -> Tensor:
        """Their scales: 16 times as much is exact, so what two planes add up to is the code times its scale."""
        if self.bits == 4:
            return scale_and_zero
        scale, zero = scale_and_zero.unbind(-1)
        return torch.cat([torch.stack([16 * scale, zero], -1), torch.stack([scale, 8 * scale], -1)])

    def _for_planes(self, x: Tensor) -> Tensor:
        """The inputs that they meet."""
        return torch.cat([x, x], dim=1) if self.bits == 8 else x


_operator_copies: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()


def forget_operator_copies() -> None:
    """Drop what code that is not compiled has packed for itself: compiled code takes over."""
    _operator_copies.clear()


class WordsInt4Linear(Int4Linear):
    """The same where compiled code for one row, for a few or for all reads codes in words (see
    ``kernels_triton_free.packed.code_words``), and other code something else. Tensors: the words come first.

    Code that is not compiled, for as long as that takes, and to compute what is asked for once, calls the operator
    over a copy that is packed when it is needed first.
    """

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return rows_of_words(tensors[0], indices, self.bits).to(self.dtype)

    def _words(self, grouped: GroupedWeight, most: int) -> Tensor:
        """The codes in words, which code for so many rows reads at most."""
        return for_rows(put_in_words(grouped.codes, self._scales(grouped), self.bits), 1, most)

    def _apply_operator(self, x: Tensor, words: Tensor, bias: Sequence[Tensor]) -> Tensor:
        if words not in _operator_copies:
            _operator_copies[words] = self._for_operator(*codes_in(words, self.bits))
        out = Int4Linear.apply(self, x, _operator_copies[words])
        return out + bias[0] if bias else out


class LoopedInt4Linear(WordsInt4Linear):
    """The same where a CPU has no products of bfloat16: all compiled code reads the words, of which there is one copy.
    Tensors: words, bias.

    On two cores of Zen 3, which has AVX2 and no more, PyTorch's operator took 200 ms for one row of SmolLM2-135M.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped, padding = _in_groups(weight, self.group_size, self.dtype), -self.out_features % REGISTER
        codes, scales = F.pad(grouped.codes, (0, 0, 0, padding)), F.pad(self._scales(grouped), (0, 0, 0, padding))
        return _with_bias((for_few_rows(put_in_words(codes, scales, self.bits)),), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        out = code_words_linear(x, words, self.bits)[:, : self.out_features]
        return out + bias[0] if bias else out


class TiledInt4Linear(WordsInt4Linear):
    """The same where a CPU multiplies bfloat16: more rows by tiles, another copy of the codes (see
    ``kernels_triton_free.packed.int4_tiles``). Tensors: words, tiles, their scales, bias.

    Two cores with AMX took for the products of SmolLM2-135M, the operator / tiles [ms]: 4 rows 7.6 / 9.6, 16 rows
    23 / 10.6, 32 rows 45 / 13, 512 rows 163 / 65 (above 60 rows the operator restores). A step of 16 rows took 19.8 ms
    in place of 29 on two cores of Zen 5, without AMX.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = _in_groups(weight, self.group_size, self.dtype)
        tiles = torch.cat([tile_int4(self._in_planes(codes)) for codes in grouped.codes.split(INT4_LANES)])
        scale_and_zero = self._scales_of_planes(self._scales(grouped))
        own = (for_rows(tensor, MAX_ROWS + 1) for tensor in (tiles, scale_and_zero))
        return _with_bias((for_few_rows(self._words(grouped, MAX_ROWS)), *own), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, tiles, scale_and_zero, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        if has_few_rows(x):
            return code_words_linear(x, words, self.bits, *bias)
        return int4_tiled_linear(self._for_planes(x), tiles, scale_and_zero, bias[0] if bias else None, self.group_size)


class RestoredInt4Linear(WordsInt4Linear):
    """The same, restored to bfloat16 for more than one row. For a head of 8 bits, whose planes tiles would restore
    twice: 16 rows took 1.6 ms in place of 3.6 (two cores of Zen 5, [49152, 576]), 4 rows 1.3, by codes in words 2.2
    (of Zen 4), where those take 0.95 for one row. Tensors: words, those of PackedLinear."""

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = _in_groups(weight, self.group_size, self.dtype)
        return (self._words(grouped, 1), *self._restored.prepare(grouped.restore(self.dtype), bias))

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        packed, *others = self._restored.kept(tensors[1:])
        return (*super().kept(tensors[:1]), for_rows(packed, 2), *others)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, *restored = tensors
        if has_single_row(x) and torch.compiler.is_compiling():
            return code_words_linear(x, words, self.bits, *restored[2:])
        return self._restored.apply(x, tuple(restored))

    @property
    def _restored(self) -> PackedLinear:
        return PackedLinear(self.out_features, "tiles")


@dataclass(frozen=True)
class RoundedInt4Linear(WordsInt4Linear):
    """4 bits for a single row. Compiled code for more rounds the weight once more, to 8 bits, and its inputs (see
    ``kernels_triton_free.packed.int8_tiles``). Tensors: words, those of Int8Tiles, bias.

    parts: of the inputs, which have scales of their own.
    """

    parts: int = 1

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = _in_groups(weight, self.group_size, self.dtype)
        values = grouped.restore(torch.float32).chunk(self.parts, dim=1)
        tiles = tile_int8([round_to_int8_rows(part, torch.float32) for part in values])
        return _with_bias((self._words(grouped, 1), *(for_rows(tensor, 2) for tensor in tiles)), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, tiles, scale, sums, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        if has_single_row(x):
            return code_words_linear(x, words, self.bits, *bias)
        return int8_tiled_linear(x, Int8Tiles(tiles, scale, sums), *bias)


@dataclass(frozen=True)
class DequantizedGroupLinear(LinearMethod):
    """Groups of inputs with a scale and an offset each, for GPUs. Tensors: codes, scale, offset, bias.

    bits 4 stores two codes per byte: inputs i and i + in / 2 share byte i, so that unpacking is two contiguous halves.
    """

    group_size: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = _in_groups(weight, self.group_size, self.dtype)
        codes = grouped.codes
        if self.bits == 4:
            first, second = codes.chunk(2, dim=1)
            codes = second << 4 | first
        return _with_bias((codes, grouped.scale.to(self.dtype), grouped.offset.to(self.dtype)), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        weight = self._restore(tensors[0], tensors[1], tensors[2])
        return F.linear(x, weight, tensors[3] if len(tensors) > 3 else None)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        codes, scale, offset = (tensor[indices] for tensor in tensors[:3])
        return self._restore(codes, scale, offset)

    def _restore(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        groups = codes.float().unflatten(-1, (-1, self.group_size))
        return (groups * scale.unsqueeze(-1).float() + offset.unsqueeze(-1).float()).flatten(-2).to(self.dtype)


@dataclass(frozen=True)
class OrderedInputs(LinearMethod):
    """A weight whose inputs lie in another order. method: multiplies them so. Tensors: the order, the method's own."""

    method: LinearMethod

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, GroupedWeight) and weight.order is not None
        return (weight.order, *self.method.prepare(replace(weight, order=None), bias))

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.apply(x[:, tensors[0]], tensors[1:])


@dataclass(frozen=True)
class SpreadGroups(LinearMethod):
    """Groups of ``size`` inputs for a method whose smallest are of ``wide`` ones: zeros fill up the inputs of a group.

    Exact, for twice the bytes of the codes where size is half of wide.
    """

    method: LinearMethod
    size: int
    wide: int
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, GroupedWeight) and weight.group_size == self.size
        return self.method.prepare(replace(weight, codes=self._spread(weight.codes)), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.apply(self._spread(x), tensors)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return self.method.rows(indices, tensors).unflatten(1, (-1, self.wide))[:, :, : self.size].flatten(1)

    def _spread(self, values: Tensor) -> Tensor:
        """[n, in] -> [n, in / size * wide]."""
        return F.pad(values.unflatten(1, (-1, self.size)), (0, self.wide - self.size)).flatten(1)


@dataclass(frozen=True)
class Float8Linear(LinearMethod):
    """float8_e4m3 weights with a scale per output, and activations with a scale per token, multiplied as float8.

    Tensors: weight [in, out] (a transposed view), scale [1, out], bias.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        if isinstance(weight, RowScaledWeight):
            values, scale = weight.values, weight.scale
        else:
            assert isinstance(weight, Tensor)
            values, scale = round_to_float8_rows(weight)
        # The operator wants the second matrix with its columns side by side in memory.
        return _with_bias((values.contiguous().t(), scale.t().contiguous()), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        x_scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / FLOAT8_MAX
        values = (x.float() / x_scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(values, tensors[0], scale_a=x_scale, scale_b=tensors[1], out_dtype=x.dtype)
        return out if len(tensors) == 2 else out + tensors[2]
