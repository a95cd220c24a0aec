"""A few rows times a weight of 4 or 8 bits, in compiled loops that read its codes in words.

A product of few rows should run at the speed of memory, but what it does with each code is in its way: for one row and
the products of SmolLM2-135M's layers PyTorch's operator over 4 bits took 3.4 ms with the weights of one layer again and
again, and 3.5 to 3.8 with all of them from memory (two cores of Zen 4). So these loops do as little as they can.

Each int32 holds codes of neighbouring inputs of one output, 8 of 4 bits or 4 of 8. Sixteen outputs lie side by side,
one vector register, and the words of a group of inputs are followed by one word with its scale and zero (bfloat16
each): [out / 16, groups, words of a group + 1, 16], which is read from front to back.

A code becomes a float without being converted. The bits of the float32 256 + c, for c below 256, are those of 256 with
c in the upper half of its mantissa, 15 bits from the right; those of 16 + c, for c below 16, are those of 16 with c 19
bits from the right. So one shift puts a byte there, and a mask and the bits of 256 (or 16) make a number of its code:
both codes of 4 bits come from one shift. What was added to the codes is taken off each group's sum, for which the
sums of the inputs are known: sum(x * (256 + c)) - 256 * sum(x). That costs 8 of float32's 24 bits; a result has 8.

Two cores of Zen 4 took for the layers, operator / these loops [ms]: 1 row 3.7 / 2.7, 2 rows 4.6 / 4.2, 4 rows 5.9 /
6.3, without what calling the operator costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.packed.rows import REGISTER, UPPER_HALF

STEP = 32
"""Inputs that are written out; a group has one such step or several."""
AT_256, BITS_OF_256 = 15, 0x43800000
AT_16, BITS_OF_16 = 19, 0x41800000
"""Where a code lies in the mantissa of 256 or 16, counted from the right, and their own bits."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("code_words_row(Tensor x, Tensor added, Tensor sums, Tensor words, int bits) -> Tensor")


def put_in_words(codes: Tensor, scale_and_zero: Tensor, bits: int) -> Tensor:
    """codes uint8 [out, in], below 2^bits, and bfloat16 [groups, out, 2] -> int32, in the order described above. out a
    multiple of REGISTER, groups of a multiple of STEP inputs."""
    groups = scale_and_zero.shape[0]
    in_bytes = codes if bits == 8 else codes[:, 1::2] << 4 | codes[:, ::2]
    words = in_bytes.contiguous().view(torch.int32).view(-1, REGISTER, groups, codes.shape[1] // groups * bits // 32)
    scales = scale_and_zero.view(torch.int32).view(groups, -1, 1, REGISTER).transpose(0, 1)
    return torch.cat([words.permute(0, 2, 3, 1), scales], 2)


def codes_in(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What ``put_in_words`` was given."""
    _, groups, _, _ = words.shape
    in_bytes = words[:, :, :-1].permute(0, 3, 1, 2).contiguous().view(torch.uint8).flatten(2).flatten(0, 1)
    codes = in_bytes if bits == 8 else torch.stack([in_bytes & 15, in_bytes >> 4], 2).flatten(1)
    scales = words[:, :, -1].transpose(0, 1).reshape(groups, -1, 1).view(torch.bfloat16)
    return codes, scales


def rows_of_words(words: Tensor, indices: Tensor, bits: int) -> Tensor:
    """Rows of the weight, as an embedding looks them up: int [n] -> float32 [n, in]."""
    own = words[indices // REGISTER, :, :, indices % REGISTER]  # [n, groups, words + 1]
    scale, zero = own[..., -1:] << 16, own[..., -1:] & UPPER_HALF
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=own.device)
    codes = (own[..., :-1, None] >> places) & (2**bits - 1)
    values = (codes.flatten(2) - 2 ** (bits - 1)) * scale.view(torch.float32) + zero.view(torch.float32)
    return values.flatten(1)


def code_words_linear(x: Tensor, words: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype, over weights (code - 2^(bits - 1)) * scale + zero, summed up in
    float32. bias [out]. To be compiled, for a fixed number of rows, which are written out (see ``template``)."""
    x32 = materialize(x.float())
    steps = x32.view(len(x), -1, STEP)
    even, odd = steps[:, :, ::2].sum(-1), steps[:, :, 1::2].sum(-1)
    # What is multiplied is 256 + code for every byte, or for its lower half, and 16 + code for its upper half.
    sums = materialize(even + odd)
    added = materialize(264 * even + 24 * odd if bits == 4 else (256 + 128) * sums)
    product = torch.ops.kernels_triton_free.code_words_row.default
    out = torch.stack([product(x32[row], added[row], sums[row], words, bits) for row in range(len(x))])
    return (out if bias is None else out + bias).to(x.dtype)


def _product(x: Tensor, added: Tensor, sums: Tensor, words: Tensor, bits: int) -> Tensor:
    codes, scales = codes_in(words, bits)
    scale, zero = scales.double().permute(2, 1, 0).unsqueeze(-1)
    values = (codes.double().unflatten(1, (scale.shape[1], -1)) - 2 ** (bits - 1)) * scale + zero
    return (values.flatten(1) @ x.double()).float()


def _product_shape(x: Tensor, added: Tensor, sums: Tensor, words: Tensor, bits: int) -> Tensor:
    return x.new_empty(words.shape[0] * REGISTER)


_library.impl("code_words_row", _product, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::code_words_row", _product_shape, lib=_library)
