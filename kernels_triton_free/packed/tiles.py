"""Products of bfloat16 by the matrix template of Inductor, over weights in tiles.

AMX multiplies a tile of 16 rows by 32 inputs with one of 32 inputs by 16 outputs; AVX512-BF16 multiplies two
inputs of 16 outputs at a time. For both a weight [out, in] lies two inputs at a time: as [out / 32, in / 2,
32, 2] for tiles of AMX, else as [out / 48, in / 2, 48, 2] or [out / 64, in / 2, 64, 2]. Inductor has a
template of matrix products, which deals blocks of rows and outputs to threads, computes what follows of a
block while that is in the cache, and reads this layout. Its innermost loops over AMX are C++ that Inductor
generates; without AMX it calls oneDNN's kernel of one block.

That kernel keeps the sums of some rows in registers, reads the block of the weight for those rows, and again
for the next. Only the first time it waits for memory, and the others wait for the arithmetic. With 48 outputs
in three registers it takes eight rows at a time, with 64 in four it takes six: so 8 rows need one pass in
place of two, 16 rows two in place of three. The products of SmolLM2-135M, head included, took on two cores of
Zen 4, with 64 / 48 (medians of 48 rounds in turn) [ms]: 1 row 11.5 / 11.0, 4 rows 17.0 / 16.1, 8 rows 15.4 /
13.3, 16 rows 17.9 / 16.8, 32 rows
30.7 / 28.5, 96 rows 78 / 72; 12 and 512 rows as long.

oneDNN divides a product among threads by its shape, and unevenly for many: on two cores of a Xeon with AMX
the products of SmolLM2-135M's layers took 111 ms for 384 rows and 60 for 512. The template divides evenly.
Compiled, with room made for what they give, they took, oneDNN / template [ms]: 1 row 15.3 / 11.3, 16 rows
15.6 / 11.9, 64 rows 25.7 / 21.8, 512 rows 91 / 69. On two cores of Zen 5, without room: 1 row 6.7 / 5.6, 4
rows 7.8 / 7.4, 16 rows 10.1 / 9.2, 64 rows 22.3 / 21.5; a step of four requests took 9.0 ms in place of 11.7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import can_pack
from kernels_triton_free.packed.rows import INPUTS, MAX_ROWS

AMX_OUTPUTS, OUTPUTS, FEWER_OUTPUTS = 32, 64, 48
"""Outputs side by side, with AMX (two tiles) and without (four registers, or three)."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("tiled_linear(Tensor x, Tensor tiles, Tensor? bias) -> Tensor")
_library.define("tiled_linear_halves(Tensor x, Tensor tiles) -> (Tensor, Tensor)")


def outputs_of_tiles() -> int:
    """Outputs side by side of the tiles that this CPU multiplies, for which it asks the operating system;
    0: none."""
    if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        return AMX_OUTPUTS
    return OUTPUTS if torch.cpu._is_avx512_bf16_supported() else 0


def can_tile(out_features: int, in_features: int) -> bool:
    """Whether ``tile`` takes a weight [out_features, in_features] of bfloat16,
    and the CPU multiplies such tiles."""
    return _tile_width(out_features) > 0 and in_features % INPUTS == 0 and can_pack(torch.bfloat16)


def _tile_width(out_features: int) -> int:
    """Outputs side by side in the tiles of a weight with so many; 0: there are no tiles of it."""
    of_cpu = outputs_of_tiles()
    widths = (FEWER_OUTPUTS, OUTPUTS) if of_cpu == OUTPUTS else (of_cpu,)
    return next((width for width in widths if width and out_features % width == 0), 0)


def tile(weight: Tensor) -> Tensor:
    """weight bfloat16 [out, in], of which ``can_tile`` holds or which is a part of such a one along its
    inputs -> the same as bfloat16 [out / 48, in, 48], or of 64 or 32 outputs. Missing inputs are filled up
    with zeros."""
    out_features, in_features = weight.shape
    missing = -in_features % INPUTS
    if missing or weight.storage_offset() % 2:  # which words of two values cannot have
        weight = F.pad(weight, (0, missing))
    outputs = _tile_width(out_features)
    pairs = weight.contiguous().view(torch.int32).view(-1, outputs, weight.shape[1] // 2)
    words = pairs.transpose(1, 2).contiguous()
    return words.view(torch.bfloat16).view(len(words), weight.shape[1], outputs)


def weight_in(tiles: Tensor) -> Tensor:
    """What ``tile`` was given: bfloat16 [out, in], filled up."""
    blocks, in_features, outputs = tiles.shape
    return tiles.view(blocks, in_features // 2, outputs, 2).transpose(1, 2).reshape(-1, in_features)


def most_rows_by_words() -> int:
    """So many rows are multiplied faster by the loops over words (see ``rows``), which wait for nothing but
    memory: on two cores of Zen 4 a step of one row took 10.3 ms in place of 13.4, of four rows 12 in place of
    13.6. With AMX, which multiplies a tile of 16 rows in no more time than one, it is one row, which has not
    been measured."""
    return 1 if outputs_of_tiles() == AMX_OUTPUTS else MAX_ROWS


def words_in(tiles: Tensor) -> Tensor:
    """The same memory in words (see ``rows``): int32 [out / 48, in / 2, 48]."""
    blocks, in_features, outputs = tiles.shape
    return tiles.view(blocks, in_features // 2, 2 * outputs).view(torch.int32)


def tiled_linear(x: Tensor, tiles: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bfloat16 [rows, in] -> [rows, out], summed up in float32. tiles: see ``tile``. bias [out].

    To be compiled (see ``template``): by itself it puts the weight together first.
    """
    return torch.ops.kernels_triton_free.tiled_linear.default(x, tiles, bias)


def can_halve(tiles: Tensor) -> bool:
    """Whether each half of the outputs has tiles of its own."""
    return tiles.shape[0] % 2 == 0


def tiled_linear_halves(x: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """``tiled_linear``, the first half of the outputs and the second by themselves,
    for tiles that ``can_halve``.

    A gated MLP multiplies the two value by value. Inductor computes a block of each half, then what follows
    of them while they are in the CPU's cache, and writes half as much: with silu, 512 rows of SmolLM2-135M's
    gate and up took 1.18 ms in place of 1.25.
    """
    halves: tuple[Tensor, Tensor] = torch.ops.kernels_triton_free.tiled_linear_halves.default(x, tiles)
    return halves


def _tiled_linear(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight_in(tiles), bias)


def _tiled_linear_shape(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], tiles.shape[0] * tiles.shape[2])


def _tiled_linear_halves(x: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tiles.chunk(2)
    return _tiled_linear(x, first, None), _tiled_linear(x, second, None)


def _tiled_linear_halves_shape(x: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tiles.chunk(2)
    return _tiled_linear_shape(x, first, None), _tiled_linear_shape(x, second, None)


_library.impl("tiled_linear", _tiled_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::tiled_linear", _tiled_linear_shape, lib=_library)
_library.impl("tiled_linear_halves", _tiled_linear_halves, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernels_triton_free::tiled_linear_halves", _tiled_linear_halves_shape, lib=_library
)
