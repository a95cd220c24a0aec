"""Products over weights of 4 bits, by the matrix template of Inductor, on CPUs that multiply bfloat16.

PyTorch's own operator over 4 bits multiplies few rows at a time, so what it takes grows with the rows. The
template restores a block of 32 outputs to bfloat16 in the first-level cache, in the order that products of
bfloat16 want, and multiplies it with all rows. It wants two outputs in a byte, which lie 16 apart: codes
[out, in] as bytes
[out / 32, in, 16].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.packed.tiles import AMX_OUTPUTS

INPUTS = 32
"""The template takes so many at a time."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define(
    "int4_tiled_linear(Tensor x, Tensor tiles, Tensor scale_and_zero, Tensor? bias, int group_size) -> Tensor"
)


def can_tile_int4(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether ``int4_tiled_linear`` takes weights of this shape and activations of this dtype."""
    return out_features % AMX_OUTPUTS == in_features % INPUTS == 0 and dtype == torch.bfloat16


def tile_int4(codes: Tensor) -> Tensor:
    """codes uint8 [out, in], 0 to 15 -> the same in tiles, as [out, in / 2].
    out a multiple of AMX_OUTPUTS."""
    low, high = codes.view(-1, 2, AMX_OUTPUTS // 2, codes.shape[1]).unbind(1)
    return (high << 4 | low).transpose(1, 2).reshape(codes.shape[0], -1)


def int4_tiled_linear(
    x: Tensor, tiles: Tensor, scale_and_zero: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    """x bfloat16 [rows, in] -> [rows, out] over tiles from ``tile_int4``: (code - 8) * scale + zero, group by
    group, rounded to bfloat16. scale_and_zero bfloat16 [in / group_size, out, 2], bias [out]. group_size: a
    power of two.

    To be compiled (see ``template``): by itself it restores the whole weight first.
    """
    return torch.ops.kernels_triton_free.int4_tiled_linear.default(x, tiles, scale_and_zero, bias, group_size)


def _int4_tiled_linear(
    x: Tensor, tiles: Tensor, scale_and_zero: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    blocks = tiles.view(-1, x.shape[1], AMX_OUTPUTS // 2)
    codes = (
        torch.cat([blocks & 15, blocks >> 4], dim=2)
        .transpose(1, 2)
        .reshape(-1, x.shape[1] // group_size, group_size)
    )
    scale, zero = scale_and_zero.permute(2, 1, 0).float().unsqueeze(-1)
    weight = ((codes.float() - 8) * scale + zero).to(x.dtype)
    return F.linear(x, weight.flatten(1), bias)


def _int4_tiled_linear_shape(
    x: Tensor, tiles: Tensor, scale_and_zero: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    return x.new_empty(x.shape[0], tiles.shape[0])


_library.impl("int4_tiled_linear", _int4_tiled_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::int4_tiled_linear", _int4_tiled_linear_shape, lib=_library)
