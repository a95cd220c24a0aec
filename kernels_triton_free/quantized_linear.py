"""Products over weights of 8 and 4 bits: PyTorch's own operators for few rows, a dense product for many.

Reading the weights is the work of a product with few rows, so there the operators that read 8 or 4 bits win.
With many rows arithmetic is the work, and the dense product over a weight restored for this call wins. Which
one runs is decided inside one operator, so that a dynamic number of rows neither compiles anything again nor
adds a guard; code for a few rows calls PyTorch's operator itself. No restored copy is kept here: restoring
costs 0.2 (8 bits) or 0.7 ms (4 bits) per 1.8 million weights, 5 to 15 % of a product with 512 rows, and a
resident copy would take more memory than the quantised weights themselves.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

INT8_MAX_ROWS = 16
INT4_MAX_ROWS = 60
"""Most rows for which the operator on quantised weights beats the dense product.

Measured on one core with avx512_bf16, weights [3072, 576], 48 of them in turn so that none stays in a cache,
bfloat16, µs a call, operator / restored and multiplied: 8 bits 8 rows 211 / 340, 16 rows 393 / 400, 24 rows
586 / 462; 4 bits 48 rows 1000 / 1190, 64 rows 1345 / 1300, 80 rows 1660 / 1435. A dense product of 64 rows
over bfloat16 takes 640. ``tests/kernels/test_bench_quantized_linear.py`` measures it again.
"""

HAS_AVX2_ONLY = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Then the operators are fast in bfloat16 alone, and dense products in float32 alone.

Two cores of Zen 3, weights [3072, 576], ms a product, operator / restored and multiplied: 4 bits in float32 1
row 2.3 / 3.7, 4 rows 12.8 / 3.3, 16 rows 44 / 2.6, in bfloat16 4 rows 0.19 / 16, 48 rows 2.2 / 167; 8 bits in
float32 1 row
1.2 / 0.8, 16 rows 13.6 / 1.0, in bfloat16 16 rows 0.9 / 3.2.
"""

INT8_INPUTS_MULTIPLE = 16
"""The 8-bit operator reads inputs 16 at a time and past the end of the row where that does not fit."""

INT4_GROUP_SIZES = (256, 128, 64, 32)
INT4_LANES = 64
"""Weights of 4 bits come in blocks of this many rows; ``pack_int4`` wants no part of one."""

RESTORED_ELEMENTS = 2_097_152
"""Weights restored at a time, so that a large vocabulary does not become a second model for the length of a
call."""

# 0x88 and 0xF0 in each of eight bytes, as int64.
_SIGN_BITS, _HIGH_NIBBLES = -0x7777777777777778, -0x0F0F0F0F0F0F0F10

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
_library.define(
    "int4_linear(Tensor x, Tensor packed, Tensor scale_and_zero, Tensor? bias, int group_size) -> Tensor"
)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [tokens, in] @ (weight int8 [out, in] * scale [out, 1])^T + bias [out];
    all but weight in x's dtype."""
    linear = _int8_linear if _are_few(x, INT8_MAX_ROWS) else torch.ops.kernels_triton_free.int8_linear.default
    return linear(x, weight, scale, bias)


def int4_linear(
    x: Tensor, packed: Tensor, scale_and_zero: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    """x [tokens, in] -> [tokens, out] over a weight from pack_int4:
    (code - 8) * scale + zero, group by group.

    scale_and_zero [in / group_size, out, 2] and bias [out] in x's dtype. group_size: one of INT4_GROUP_SIZES.
    """
    linear = _int4_linear if _are_few(x, INT4_MAX_ROWS) else torch.ops.kernels_triton_free.int4_linear.default
    return linear(x, packed, scale_and_zero, bias, group_size)


def _are_few(x: Tensor, most: int) -> bool:
    """Whether there is one row, or code is exported for a fixed number of rows, at most ``most``. While
    torch.compile traces, a number that varies looks like an int, and to compare it would fix the code to one
    side."""
    return x.shape[0] == 1 or (
        torch.compiler.is_exporting() and isinstance(x.shape[0], int) and x.shape[0] <= most
    )


def _takes_operator(x: Tensor, most: int, most_in_float32: int) -> bool:
    """Whether the operator on quantised weights is called, where that is at most for so many rows;
    the second number holds with AVX2 and no more."""
    return x.shape[0] <= (most_in_float32 if HAS_AVX2_ONLY and x.dtype == torch.float32 else most)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight [in, out], in float32 where that is faster."""
    if HAS_AVX2_ONLY and x.dtype == torch.bfloat16:
        return (x.float() @ weight.float()).to(x.dtype)
    return x @ weight


def can_multiply_int4() -> bool:
    """True if this CPU packs 4 bits in an order that is known here, so that rows can be restored again."""
    return _half_block() is not None


def pack_int4(codes: Tensor) -> Tensor:
    """codes uint8 [out, in], 0 to 15 -> the operator's layout [out, in / 2];
    out a multiple of INT4_LANES, in even."""
    out = torch.empty(codes.shape[0], codes.shape[1] // 2, dtype=torch.uint8)
    step = max(INT4_LANES, RESTORED_ELEMENTS // codes.shape[1] // INT4_LANES * INT4_LANES)
    for first in range(0, codes.shape[0], step):
        # The operator wants int32, four times what the codes take, hence piece by piece.
        piece = codes[first : first + step].to(torch.int32)
        out[first : first + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(piece, 1)
    return out


def int4_rows(packed: Tensor, scale_and_zero: Tensor, indices: Tensor, group_size: int) -> Tensor:
    """Rows of a weight from pack_int4 (an embedding): indices [n] -> float32 [n, in]."""
    half = _half_block()
    assert half is not None, "pack_int4 would have failed"
    out_features, inputs = packed.shape[0], packed.shape[1] * 2
    lane = indices % (2 * half)
    byte = packed.view(out_features // (2 * half), inputs, half)[indices // (2 * half), :, lane % half]
    codes = (byte >> (4 * (lane // half)).to(torch.uint8)[:, None]) & 15
    values = codes.to(torch.float32).view(-1, inputs // group_size, group_size) - 8
    scale, zero = scale_and_zero[:, indices].float().permute(2, 1, 0).unsqueeze(-1).unbind(0)
    return (values * scale + zero).view(-1, inputs)


def int8_rows(weight: Tensor, scale: Tensor, indices: Tensor) -> Tensor:
    """Rows of a weight of int8_linear (an embedding): indices [n] -> float32 [n, in]."""
    return weight[indices].float() * scale[indices].float()


def restore_int4(packed: Tensor, scale_and_zero: Tensor, group_size: int) -> Tensor:
    """The weight behind pack_int4 as [in, out] in scale_and_zero's dtype:
    transposed, the way it is multiplied.

    Few passes over few bytes: nibbles are split eight bytes at a time, a flipped upper bit makes code - 8 of
    each one, and read as int8 the upper nibble is 16 times that, so no pass subtracts anything. Scales meet
    the weights where the rows of the product lie side by side, which makes the broadcast a plain vector
    operation.
    """
    half = _half_block()
    assert half is not None, "pack_int4 would have failed"
    rows, inputs = packed.shape[0], packed.shape[1] * 2
    words = packed.view(torch.int64) ^ _SIGN_BITS
    weight = torch.empty(inputs, rows // (2 * half), 2, half, dtype=scale_and_zero.dtype)
    for part, nibbles in enumerate(
        ((words << 4).bitwise_and_(_HIGH_NIBBLES), words.bitwise_and_(_HIGH_NIBBLES))
    ):
        codes = nibbles.view(torch.int8).view(-1, inputs, half).to(scale_and_zero.dtype)
        weight[:, :, part] = codes.transpose(0, 1)
    grouped = weight.view(inputs // group_size, group_size, rows)
    scale, zero = scale_and_zero.permute(2, 0, 1).contiguous().unsqueeze(2).unbind(0)
    return torch.addcmul(zero, grouped, scale, value=1 / 16, out=grouped).view(inputs, rows)


def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    flat_scale = scale.view(-1)
    if _takes_operator(x, INT8_MAX_ROWS, 0) and x.shape[1] % INT8_INPUTS_MULTIPLE == 0:
        out = torch.ops.aten._weight_int8pack_mm.default(x.contiguous(), weight, flat_scale)
    else:
        step = max(1, RESTORED_ELEMENTS // weight.shape[1])
        pieces = [
            _product(x, weight[first : first + step].to(x.dtype).T)
            for first in range(0, weight.shape[0], step)
        ]
        out = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).mul_(flat_scale)
    return out if bias is None else out.add_(bias)


def _int4_linear(
    x: Tensor, packed: Tensor, scale_and_zero: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    if _takes_operator(x, INT4_MAX_ROWS, 1):
        out = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            x.contiguous(), packed, group_size, scale_and_zero
        )
    else:
        step = max(1, RESTORED_ELEMENTS // (packed.shape[1] * 2) // INT4_LANES) * INT4_LANES
        pieces = [
            _product(
                x,
                restore_int4(
                    packed[first : first + step], scale_and_zero[:, first : first + step], group_size
                ),
            )
            for first in range(0, packed.shape[0], step)
        ]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out if bias is None else out.add_(bias)


def _same_rows(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_library.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
_library.impl("int4_linear", _int4_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::int8_linear", _same_rows, lib=_library)
torch.library.register_fake("kernels_triton_free::int4_linear", _same_rows, lib=_library)


@lru_cache(maxsize=1)
def _half_block() -> int | None:
    """Rows whose low nibbles share a run of bytes with as many high nibbles;
    None if this CPU packs otherwise.

    The order depends on the vector width the operator was built for (32 rows with AVX-512, 16 with AVX2), so
    a small weight is packed and compared with what either order gives.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2 * INT4_LANES, 2), generator=generator, dtype=torch.int32)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(codes, 1).flatten()
    except (RuntimeError, NotImplementedError):
        return None
    for half in (32, 16):
        low, high = codes.to(torch.uint8).view(-1, 2, half, 2).transpose(2, 3).unbind(1)
        if torch.equal((high << 4 | low).flatten(), packed):
            return half
    return None
