"""Products of inputs and weights that are rounded to 8 bits, by the matrix template of Inductor, on CPUs with VNNI.

AVX512-VNNI multiplies four neighbouring inputs of 16 outputs at a time and adds them up as 32-bit integers, twice as
many as AVX512-BF16 does in the same time, and a weight of 8 bits is half as long to read. Inductor generates the
innermost loops. They take inputs without a sign, 0 to 255, and weights with one.

A weight has one scale per output. Inputs are rounded as they come, each token by its own range: the number n stands
for (n - zero) * scale. Both may be cut into parts along the inputs, each with scales of its own. So a product is
scale * (sum of n * weight - zero * sum of weight), and the second sum is known beforehand. The integers are exact; what
is lost is lost in rounding, which is why ``minivllm.linear.choose`` says which layers bear it. (Scale and zero per
token: Yao et al., "ZeroQuant", 2022.)

The products of all layers of SmolLM2-135M took, 8 bits / bfloat16 / 4 bits restored to bfloat16 [ms], on two cores of
Zen 4: 4 rows 3.7 / 8.7 / 8.7, 16 rows 7.1 / 14.6 / 14.4, 512 rows 163 / 285 / 275, in one part, rounding of the inputs
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.packed.tiles import OUTPUTS, outputs_of_tiles

TOGETHER = 4
"""Inputs that one instruction multiplies and adds up."""
SMALLEST_SCALE = 1e-12
"""Of a token whose inputs are all zero."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("int8_tiled_product(Tensor numbers, Tensor tiles) -> Tensor")


class RoundedTokens(NamedTuple):
    """numbers uint8 [rows, parts, in / parts]; scale, zero float32 [rows, parts, 1]: a number n stands for
    (n - zero) * scale."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor


class Int8Tiles(NamedTuple):
    """A weight [out, in] whose inputs are in parts of equal size.

    tiles int8 [parts, out / 64, in / parts, 64]: four inputs of an output lie side by side. scale, sums float32
    [parts, out]: of each output, and the sum of its numbers.
    """

    tiles: Tensor
    scale: Tensor
    sums: Tensor


def can_tile_int8(out_features: int, in_features: int, parts: int = 1) -> bool:
    """Whether ``tile_int8`` takes a weight of this shape, and this CPU has VNNI and no AMX: there tiles of bfloat16
    are multiplied by AMX."""
    return (
        outputs_of_tiles() == OUTPUTS
        and torch.cpu._is_vnni_supported()
        and out_features % OUTPUTS == in_features % (parts * TOGETHER) == 0
    )


def tile_int8(parts: Sequence[tuple[Tensor, Tensor]]) -> Int8Tiles:
    """parts: int8 [out, in / parts] and scale [out, 1] of each."""
    tiles = []
    for values, _ in parts:
        in_features = values.shape[1]
        blocks = values.view(-1, OUTPUTS, in_features // TOGETHER, TOGETHER).transpose(1, 2)
        tiles.append(blocks.reshape(-1, in_features, OUTPUTS))
    scale = torch.stack([scale.float().flatten() for _, scale in parts])
    return Int8Tiles(
        torch.stack(tiles), scale, torch.stack([values.sum(1, dtype=torch.float32) for values, _ in parts])
    )


def round_tokens(x: Tensor) -> RoundedTokens:
    """x [rows, parts, in / parts] -> its numbers of 8 bits. Zero is among what they stand for, exactly."""
    x = x.float()
    lowest, highest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((highest - lowest) / 255).clamp(min=SMALLEST_SCALE)
    zero = (-lowest / scale).round()
    return RoundedTokens(((x / scale).round() + zero).clamp(0, 255).to(torch.uint8), scale, zero)


def int8_tiled_linear(x: Tensor, weight: Int8Tiles, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype, summed up in float32. bias [out]. To be compiled (see
    ``template``)."""
    parts, _, in_features, _ = weight.tiles.shape
    tokens = round_tokens(x.view(-1, parts, in_features))
    out: Tensor | None = None if bias is None else bias.float()
    for part in range(parts):
        numbers, scale, zero = (tensor[:, part] for tensor in tokens)
        product = torch.ops.kernels_triton_free.int8_tiled_product.default(numbers, weight.tiles[part])
        own = (product - zero * weight.sums[part]) * (scale * weight.scale[part])
        out = own if out is None else out + own
    assert out is not None
    return out.to(x.dtype)


def _product(numbers: Tensor, tiles: Tensor) -> Tensor:
    blocks, in_features, outputs = tiles.shape
    weight = tiles.view(blocks, in_features // TOGETHER, outputs, TOGETHER).transpose(1, 2).reshape(-1, in_features)
    return (numbers.double() @ weight.double().T).float()


def _product_shape(numbers: Tensor, tiles: Tensor) -> Tensor:
    return numbers.new_empty(numbers.shape[0], tiles.shape[0] * tiles.shape[2], dtype=torch.float32)


_library.impl("int8_tiled_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::int8_tiled_product", _product_shape, lib=_library)
