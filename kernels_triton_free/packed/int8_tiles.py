"""Products of inputs and weights that are rounded to 8 bits, by the matrix template of Inductor,
on CPUs with VNNI.

AVX512-VNNI multiplies four neighbouring inputs of 16 outputs at a time and adds them up as 32-bit integers,
twice as many as AVX512-BF16 does in the same time, and a weight of 8 bits is half as long to read. Inductor
generates the innermost loops. They take inputs without a sign, 0 to 255, and weights with one.

A weight has one scale per output. Inputs are rounded as they come, each token by its largest value. What is
lost is lost in this rounding: the largest input may be a hundred times the others, and then they share what
is left of 127 steps. So inputs are rotated before: every 16 of them, a sixteenth of the row apart, become 16
sums and differences of them all, which have about the same size. (Hadamard's matrix H of signs, of which H H
= 16: the weight's inputs are rotated too when it is loaded, so that the product is 16 times what it was.
Ashkboos et al., "QuaRot", 2024.) It takes four additions a value, and in most layers less than half of what
was lost is lost then (see ``minivllm.linear.choose``). Sums of 32 lose a fifth less, but their loops take
minutes to compile.

The number n stands for (n - 128) * scale. The integers of a product are exact: the 128 times the sum of an
output's weights that they hold too much is known beforehand.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.compiler.as_one import define_as_one
from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.packed.tiles import OUTPUTS, outputs_of_tiles

TOGETHER = 4
"""Inputs that one instruction multiplies and adds up."""
ROTATED = 16
"""Inputs that become sums of each other: a vector of each fits into half of the vector registers."""
ZERO, LARGEST = 128, 127
"""The number that stands for zero, and the distance from it of a token's largest value."""
HALF_ABOVE_ZERO = ZERO + 0.5
"""What is never negative is rounded by cutting off."""
SMALLEST = 1e-12
"""Largest value of a token whose inputs are all zero."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("int8_tiled_product(Tensor numbers, Tensor tiles) -> Tensor")
_library.define("int8_tiled_product_halves(Tensor numbers, Tensor tiles) -> (Tensor, Tensor)")


class Int8Tiles(NamedTuple):
    """A weight [out, in], rotated.

    tiles int8 [out / 64, in, 64]: four inputs of an output lie side by side. scale float32 [out]. surplus
    int32 [out]: what a product of numbers holds too much.
    """

    tiles: Tensor
    scale: Tensor
    surplus: Tensor


def can_tile_int8(out_features: int, in_features: int) -> bool:
    """Whether ``tile_int8`` takes a weight of this shape, and this CPU has VNNI and no AMX:
    there tiles of bfloat16 are multiplied by AMX."""
    return (
        outputs_of_tiles() == OUTPUTS
        and torch.cpu._is_vnni_supported()
        and out_features % OUTPUTS == in_features % ROTATED == 0
    )


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    """Hadamard's matrix, by Sylvester: float32 [16, 16]."""
    signs = torch.ones(1, 1)
    while len(signs) < ROTATED:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs


def rotate_weight(weight: Tensor) -> Tensor:
    """weight float32 [out, in] -> what multiplies rotated inputs,
    so that the product is 16 times what it was."""
    return (_signs() @ weight.view(len(weight), ROTATED, -1)).flatten(1)


def tile_int8(values: Tensor, scale: Tensor) -> Int8Tiles:
    """values int8 [out, in] and scale [out, 1], of a weight from ``rotate_weight``."""
    in_features = values.shape[1]
    blocks = values.view(-1, OUTPUTS, in_features // TOGETHER, TOGETHER).transpose(1, 2)
    return Int8Tiles(
        blocks.reshape(-1, in_features, OUTPUTS),
        scale.float().flatten() / ROTATED,
        ZERO * values.sum(1, dtype=torch.int32),
    )


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> numbers uint8 [rows, in], rotated, and scale float32 [rows, 1]."""
    numbers, largest = torch.ops.kernels_triton_free.round_tokens.default(x)
    return numbers, largest / LARGEST


def int8_tiled_linear(x: Tensor, weight: Int8Tiles, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype, summed up exactly. bias [out]. To be compiled (see
    ``template``)."""
    numbers, scale = round_tokens(x)
    product = torch.ops.kernels_triton_free.int8_tiled_product.default(numbers, weight.tiles)
    out = (product - weight.surplus).float() * (scale * weight.scale)
    # Computed while a block of the product is in the cache:
    # what follows would be, of numbers that are read anew.
    return materialize((out if bias is None else out + bias.float()).to(x.dtype))


def int8_tiled_linear_halves(x: Tensor, weight: Int8Tiles) -> tuple[Tensor, Tensor]:
    """``int8_tiled_linear``, the first half of the outputs and the second by themselves, each a whole number
    of tiles (see ``tiled_linear_halves``)."""
    numbers, scale = round_tokens(x)
    products = torch.ops.kernels_triton_free.int8_tiled_product_halves.default(numbers, weight.tiles)
    surplus, scales = weight.surplus.chunk(2), weight.scale.chunk(2)
    first, second = (
        ((product - own_surplus).float() * (scale * own_scale)).to(x.dtype)
        for product, own_surplus, own_scale in zip(products, surplus, scales)
    )
    return first, second


def _round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = list(x.float().split(x.shape[1] // ROTATED, 1))
    step = 1
    while step < ROTATED:  # the sums of ``rotate_weight`` in four steps, each of two values
        parts = [
            parts[place ^ step] - part if place & step else part + parts[place + step]
            for place, part in enumerate(parts)
        ]
        step *= 2
    largest = reduce(torch.maximum, [part.abs() for part in parts]).amax(-1, keepdim=True).clamp(min=SMALLEST)
    return torch.cat(
        [(part * (LARGEST / largest) + HALF_ABOVE_ZERO).to(torch.uint8) for part in parts], 1
    ), largest


def _rounded_shape(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _product(numbers: Tensor, tiles: Tensor) -> Tensor:
    blocks, in_features, outputs = tiles.shape
    weight = (
        tiles.view(blocks, in_features // TOGETHER, outputs, TOGETHER)
        .transpose(1, 2)
        .reshape(-1, in_features)
    )
    return (numbers.double() @ weight.double().T).int()


def _product_shape(numbers: Tensor, tiles: Tensor) -> Tensor:
    return numbers.new_empty(numbers.shape[0], tiles.shape[0] * tiles.shape[2], dtype=torch.int32)


def _product_halves(numbers: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tiles.chunk(2)
    return _product(numbers, first), _product(numbers, second)


def _product_halves_shape(numbers: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tiles.chunk(2)
    return _product_shape(numbers, first), _product_shape(numbers, second)


define_as_one("round_tokens(Tensor x) -> (Tensor, Tensor)", _round_tokens, _rounded_shape)
_library.impl("int8_tiled_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::int8_tiled_product", _product_shape, lib=_library)
_library.impl("int8_tiled_product_halves", _product_halves, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kernels_triton_free::int8_tiled_product_halves", _product_halves_shape, lib=_library
)
