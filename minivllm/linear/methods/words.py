"""Groups of 4 or 8 bits, which compiled code reads in words for one row, for a few or for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.packed.code_words import (
    LANES,
    code_words_linear,
    codes_in,
    put_in_words,
    rows_of_words,
)
from kernels_triton_free.packed.int4_tiles import int4_tiled_linear, tile_int4
from kernels_triton_free.packed.int8_tiles import (
    Int8Tiles,
    int8_tiled_linear,
    int8_tiled_linear_halves,
    tile_int8,
)
from kernels_triton_free.packed.rows import MAX_ROWS, has_few_rows, has_single_row
from kernels_triton_free.packed.tiles import can_halve
from kernels_triton_free.packed.whole_numbers import DTYPES, WholeNumbers, parts_of, whole_numbers_linear
from kernels_triton_free.quantized_linear import INT4_LANES
from minivllm.linear.methods.exact import TiledLinear
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.method import LinearTensors, uncompiled_copies, with_bias
from minivllm.weights.stored_weight import (
    GroupedWeight,
    StoredWeight,
    in_groups,
    round_groups_to_rows,
    round_rotated_rows,
)


class WordsInt4Linear(Int4Linear):
    """The same where compiled code for one row, for a few or for all reads codes in words (see
    ``kernels_triton_free.packed.code_words``), and other code something else. Tensors: the words come first.

    Code that is not compiled, for as long as that takes, and to compute what is asked for once, calls the
    operator over a copy that is packed when it is needed first.
    """

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return rows_of_words(tensors[0], indices, self.bits).to(self.dtype)

    def _words(self, grouped: GroupedWeight) -> Tensor:
        """The codes in words. Outputs are filled up with zeros."""
        padding = 0, 0, 0, -self.out_features % LANES
        codes, scales = F.pad(grouped.codes, padding), F.pad(self._scales(grouped), padding)
        return put_in_words(codes, scales, self.bits)

    def _apply_words(self, x: Tensor, words: Tensor, bias: Sequence[Tensor]) -> Tensor:
        """What compiled code computes of them."""
        out = code_words_linear(x, words, self.bits)[:, : self.out_features]
        return out + bias[0] if bias else out

    def _apply_operator(self, x: Tensor, words: Tensor, bias: Sequence[Tensor]) -> Tensor:
        if words not in uncompiled_copies:
            uncompiled_copies[words] = self._for_operator(*codes_in(words, self.bits))
        out = Int4Linear.apply(self, x, uncompiled_copies[words])
        return out + bias[0] if bias else out


class LoopedInt4Linear(WordsInt4Linear):
    """The same where a CPU has no products of bfloat16:
    all compiled code reads the words, of which there is one copy. Tensors: words, bias.

    On two cores of Zen 3, which has AVX2 and no more,
    PyTorch's operator took 200 ms for one row of SmolLM2-135M in float32.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        return with_bias((self._words(grouped),), bias)

    @property
    def has_loops(self) -> bool:
        return True

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        return self._apply_words(x, words, bias)


@dataclass(frozen=True)
class WholeInt4Linear(WordsInt4Linear):
    """4 or 8 bits for a single row. Compiled code for more rounds the weight once more, to whole numbers, and
    its inputs to more bits than that (see ``kernels_triton_free.packed.whole_numbers``). Tensors: words,
    those of WholeNumbers, bias.

    With words of 4 bits, which take 0.75 bytes a weight with scales of float32, it takes 1.76 in all. Code
    for a few rows has sums for no more than those: a step of four requests took 23 ms in place of 29, of two
    21 in place of 27 (two cores of Zen 3, SmolLM2-135M).
    rounded_bits: of the whole numbers, 8 or 10.
    """

    rounded_bits: int = 8

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        parts = [grouped.part(slice(None), own) for own in parts_of(grouped.shape[1])]
        rounded = [round_groups_to_rows(part, self.rounded_bits, DTYPES[self.rounded_bits]) for part in parts]
        values = rounded[0][0] if len(parts) == 1 else torch.cat([values for values, _ in rounded], 1)
        scale = torch.cat([scale for _, scale in rounded], 1).T.contiguous()
        return with_bias((self._words(grouped), *WholeNumbers(values, scale)), bias)

    @property
    def has_loops(self) -> bool:
        return True

    @property
    def rows_read(self) -> tuple[tuple[int, int | None], ...]:
        return (1, 1), (2, None), (2, None)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, values, scale, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        if has_single_row(x):
            return self._apply_words(x, words, bias)
        return whole_numbers_linear(x, WholeNumbers(values, scale), *bias)


class TiledInt4Linear(WordsInt4Linear):
    """The same where a CPU multiplies bfloat16: more rows by tiles, another copy of the codes (see
    ``kernels_triton_free.packed.int4_tiles``). Tensors: words, tiles, their scales, bias.

    Two cores with AMX took for the products of SmolLM2-135M, the operator / tiles [ms]:
    4 rows 7.6 / 9.6, 16 rows
    23 / 10.6, 32 rows 45 / 13, 512 rows 163 / 65 (above 60 rows the operator restores). A step of 16 rows
    took 19.8 ms in place of 29 on two cores of Zen 5, without AMX.
    """

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        tiles = torch.cat([tile_int4(self._in_planes(codes)) for codes in grouped.codes.split(INT4_LANES)])
        scale_and_zero = self._scales_of_planes(self._scales(grouped))
        return with_bias((self._words(grouped), tiles, scale_and_zero), bias)

    @property
    def has_loops(self) -> bool:
        return True

    @property
    def rows_read(self) -> tuple[tuple[int, int | None], ...]:
        return (1, MAX_ROWS), (MAX_ROWS + 1, None), (MAX_ROWS + 1, None)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, tiles, scale_and_zero, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        if has_few_rows(x):
            return code_words_linear(x, words, self.bits, *bias)
        return int4_tiled_linear(
            self._for_planes(x), tiles, scale_and_zero, bias[0] if bias else None, self.group_size
        )


class RestoredInt4Linear(WordsInt4Linear):
    """The same, restored to bfloat16 for more than one row. For a head of 8 bits, whose planes tiles would
    restore twice: 16 rows took 1.6 ms in place of 3.6 (two cores of Zen 5, [49152, 576]), 4 rows 1.3, by
    codes in words 2.2 (of Zen 4), where those take 0.95 for one row. Tensors: words, those of TiledLinear."""

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        return (self._words(grouped), *self._restored.prepare(grouped.restore(self.dtype), bias))

    @property
    def has_loops(self) -> bool:
        return self._restored.has_loops

    @property
    def rows_read(self) -> tuple[tuple[int, int | None], ...]:
        return (1, 1), (2, None)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, *restored = tensors
        if has_single_row(x) and torch.compiler.is_compiling():
            return code_words_linear(x, words, self.bits, *restored[1:])
        return self._restored.apply(x, tuple(restored))

    @property
    def _restored(self) -> TiledLinear:
        return TiledLinear(self.out_features)


class RoundedInt4Linear(WordsInt4Linear):
    """4 or 8 bits for a single row. Compiled code for more rounds the weight once more, to 8 bits, and its
    inputs (see ``kernels_triton_free.packed.int8_tiles``). Tensors: words, those of Int8Tiles, bias."""

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        grouped = in_groups(weight, self.group_size, self.dtype)
        tiles = tile_int8(*round_rotated_rows(grouped))
        return with_bias((self._words(grouped), *tiles), bias)

    @property
    def rows_read(self) -> tuple[tuple[int, int | None], ...]:
        return (1, 1), (2, None), (2, None), (2, None)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, tiles, scale, surplus, *bias = tensors
        if not torch.compiler.is_compiling():
            return self._apply_operator(x, words, bias)
        if has_single_row(x):
            return code_words_linear(x, words, self.bits, *bias)
        return int8_tiled_linear(x, Int8Tiles(tiles, scale, surplus), *bias)

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        is_tiled = torch.compiler.is_compiling() and not has_single_row(x)
        if is_tiled and len(tensors) == 4 and can_halve(tensors[1]):
            return int8_tiled_linear_halves(x, Int8Tiles(*tensors[1:]))
        return super().apply_halves(x, tensors)
