"""Rows times a weight of 4, 8, 16 or 32 bits, in compiled loops that read its codes in words.

A product of few rows should run at the speed of memory, but what it does with each code is in its way: for
one row and the products of SmolLM2-135M's layers PyTorch's operator over 4 bits took 3.4 ms with the weights
of one layer again and again, and 3.5 to 3.8 with all of them from memory (two cores of Zen 4). So these loops
do as little as they can.

Each int32 holds codes of neighbouring inputs of one output, 8 of 4 bits or 4 of 8. As many outputs lie side
by side as a vector register takes, 16 with AVX-512 and else 8 (LANES), and the words of a group of inputs are
followed by its scale and zero, in one word (bfloat16 each) or two (float32): [out / LANES, groups, words of a
group + 1 or 2, LANES], which is read from front to back.

A code becomes a float without being converted. The bits of the float32 256 + c, for c below 256, are those of
256 with c in the upper half of its mantissa, 15 bits from the right; those of 16 + c, for c below 16, are
those of 16 with c 19 bits from the right. So one shift puts a byte there, and a mask and the bits of 256 (or
16) make a number of its code: both codes of 4 bits come from one shift. What was added to the codes is taken
off each group's sum, for which the sums of the inputs are known: sum(x * (256 + c)) - 256 * sum(x). That
costs 8 of float32's 24 bits; a result of bfloat16 has 8. Where results are float32, as scales are then, a
code is converted. For a few rows it is not shifted before, so that it is a power of 2 times as large, by
which its input is divided, exactly; only one shift moves a word's upper half into the lower one, clear of the
sign. With that and four chains of sums in place of two, one row and as many weights of 4 bits as
SmolLM2-135M's layers have took 5.9 to 6.4 ms in place of 6.4 to 7.0 (two cores of Zen 3, in turn); with
AVX-512 it was not measured.

Two cores of Zen 4 took for the layers, operator / these loops [ms]: 1 row 3.7 / 2.7, 2 rows 4.6 / 4.2, 4 rows
5.9 / 6.3, without what calling the operator costs.

More rows go through the same words, eight at a time: each code is made a float with its scale once, and
multiplied with eight inputs. Above ``MANY_ROWS`` it is worth restoring the weight and calling the product of
a library. So a CPU without products of bfloat16 can compute all its rows from one copy. With AVX2 and no more
PyTorch's operator took 200 ms for one row in float32 (two cores of Zen 3), where a step of one request then
took 10 ms, of four 19, of sixteen 57, and a prompt of 512 tokens 0.85 s. With AVX-512 and no products of
bfloat16 nothing was measured.

Floats lie in words too, two of bfloat16 in each or one of float32, in the same order and without scales, for
the same loops. With bfloat16 a step of one request of SmolLM2-135M took 15.5 ms on those cores, of four 21,
of sixteen 51 and a prompt of 512 tokens 0.87 s; with float32 28, 39, 84 and 1.1 s, where the library alone
took 54 ms for one, 125 for sixteen and as long for the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.packed.rows import MAX_ROWS, UPPER_HALF, has_few_rows

STEP = 32
"""Inputs that are written out; a group has one such step or several."""
AT_256, BITS_OF_256 = 15, 0x43800000
AT_16, BITS_OF_16 = 19, 0x41800000
"""Where a code lies in the mantissa of 256 or 16, counted from the right, and their own bits."""
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
LANES = 16 if HAS_AVX512 else 8
"""A vector register of float32."""
ROWS_TOGETHER = 8
"""Of several rows: each has a vector register of sums, of which AVX2 has 16."""
CODES_AT_ONCE = 8
"""Of several rows, those of each that are written out."""
MOST_ROWS_IN_STEPS = MAX_ROWS if HAS_AVX512 else 1
"""Rows for which whole steps are written out. AVX2 has half as many registers as AVX-512: four rows took 18
ms in place of 15 there, and the C++ compiler 58 seconds in place of 16 (two cores of Zen 3)."""
CHAINS = 2 if HAS_AVX512 else 4
"""Of sums, of one row: a sum waits for the one before. On two cores of Zen 4 one row took 3.7 ms with one,
2.7 with two; with AVX2 8 were slower than 4."""
MANY_ROWS = 64
"""More are multiplied with the restored weight, in the order [in, out]. On two cores of Zen 3 the library's
product of float32 did 143 billion additions and multiplications a second for 512 rows of SmolLM2-135M's
layers, 50 for 32 and 30 for 16; these loops some 85."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define(
    "code_words_row(Tensor x, Tensor placed, Tensor added, Tensor sums, Tensor words, int bits) -> Tensor"
)
_library.define("code_words_rows(Tensor x, Tensor words, int bits) -> Tensor")


def can_put_in_words(group_size: int, dtype: torch.dtype) -> bool:
    """Whether ``put_in_words`` takes such groups, with scales of this dtype."""
    return group_size % STEP == 0 and dtype in (torch.bfloat16, torch.float32)


def put_in_words(codes: Tensor, scale_and_zero: Tensor, bits: int) -> Tensor:
    """codes uint8 [out, in], below 2^bits, and bfloat16 or float32 [groups, out, 2] -> int32, in the order
    described above. out a multiple of LANES, groups of a multiple of STEP inputs."""
    groups = scale_and_zero.shape[0]
    in_bytes = codes if bits == 8 else codes[:, 1::2] << 4 | codes[:, ::2]
    words = (
        in_bytes.contiguous().view(torch.int32).view(-1, LANES, groups, codes.shape[1] // groups * bits // 32)
    )
    scales = scale_and_zero.contiguous().view(torch.int32).view(groups, len(codes) // LANES, LANES, -1)
    return torch.cat([words.permute(0, 2, 3, 1), scales.permute(1, 0, 3, 2)], 2)


def floats_in_words(weight: Tensor) -> Tensor:
    """weight [out, in], bfloat16 or float32 -> int32 [out / LANES, 1, words of an output, LANES], without
    scales: words of 16 or 32 bits. out a multiple of LANES, in an even number where the weight is
    bfloat16."""
    words = weight.contiguous().view(torch.int32).view(-1, LANES, weight.shape[1] * weight.itemsize // 4)
    return words.transpose(1, 2).contiguous().unsqueeze(1)


def floats_in(words: Tensor, bits: int) -> Tensor:
    """What ``floats_in_words`` was given, float32."""
    return _values(words.squeeze(1), bits).transpose(1, 2).flatten(0, 1)


def words_of_scales(depth: int, bits: int) -> int:
    """Of the words of a group, those at its end that hold its scale and zero:
    those of codes are a multiple of bits."""
    return depth % bits if bits <= 8 else 0


def has_exact_codes(depth: int, bits: int) -> bool:
    """Whether loops make floats of codes by conversion, to which nothing is added:
    where scales are float32."""
    return words_of_scales(depth, bits) == 2


def codes_in(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What ``put_in_words`` was given."""
    _, groups, depth, _ = words.shape
    behind = words_of_scales(depth, bits)
    in_bytes = (
        words[:, :, :-behind].permute(0, 3, 1, 2).contiguous().view(torch.uint8).flatten(2).flatten(0, 1)
    )
    codes = in_bytes if bits == 8 else torch.stack([in_bytes & 15, in_bytes >> 4], 2).flatten(1)
    scales = words[:, :, -behind:].permute(1, 0, 3, 2).reshape(-1)
    return codes, scales.view(torch.bfloat16 if behind == 1 else torch.float32).view(groups, -1, 2)


def _scale_and_zero(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """words [..., depth, n] -> scale and zero, float32 [..., 1, n]."""
    if words_of_scales(words.shape[-2], bits) == 1:
        last = words[..., -1:, :]
        return (last << 16).view(torch.float32), (last & UPPER_HALF).view(torch.float32)
    return words[..., -2:-1, :].view(torch.float32), words[..., -1:, :].view(torch.float32)


def _values(words: Tensor, bits: int) -> Tensor:
    """words [..., depth, n] of groups -> the weights of their inputs, float32 [..., inputs of a group, n]."""
    if bits == 32:
        return words.view(torch.float32)
    if bits == 16:
        return torch.stack([words << 16, words & UPPER_HALF], -2).view(torch.float32).flatten(-3, -2)
    scale, zero = _scale_and_zero(words, bits)
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device).unsqueeze(1)
    codes = words[..., : -words_of_scales(words.shape[-2], bits), :].unsqueeze(-2) >> places & (2**bits - 1)
    return (codes - 2 ** (bits - 1)).flatten(-3, -2) * scale + zero


def rows_of_words(words: Tensor, indices: Tensor, bits: int) -> Tensor:
    """Rows of the weight, as an embedding looks them up: int [n] -> float32 [n, in]."""
    own = words[indices // LANES, :, :, indices % LANES]  # [n, groups, depth]
    return _values(own.unsqueeze(-1), bits).flatten(1)


def code_words_linear(x: Tensor, words: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype, summed up in float32, over weights (code - 2^(bits - 1))
    * scale + zero, or over floats. bias [out]. To be compiled (see ``word_loops``)."""
    x32 = materialize(x.float())
    in_steps = bits <= 8 and has_few_rows(x, MOST_ROWS_IN_STEPS)
    out = (_few_rows if in_steps else _several_rows)(x32, words, bits)
    return (out if bias is None else out + bias).to(x.dtype)


def _few_rows(x: Tensor, words: Tensor, bits: int) -> Tensor:
    """For a fixed number of rows, which are written out. x float32."""
    steps = x.view(len(x), -1, STEP)
    even, odd = steps[:, :, ::2].sum(-1), steps[:, :, 1::2].sum(-1)
    # What is multiplied is 256 + code for every byte, or for its lower half,
    # and 16 + code for its upper half.
    sums, placed = materialize(even + odd), x
    if has_exact_codes(words.shape[2], bits):
        added, placed = 2 ** (bits - 1) * sums, materialize(_for_placed_codes(x, bits))
    else:
        added = 264 * even + 24 * odd if bits == 4 else (256 + 128) * sums
    added = materialize(added)
    product = torch.ops.kernels_triton_free.code_words_row.default
    return torch.stack(
        [product(x[row], placed[row], added[row], sums[row], words, bits) for row in range(len(x))]
    )


def _for_placed_codes(x: Tensor, bits: int) -> Tensor:
    """x as it meets codes that are converted where they lie in their half of a word."""
    place = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) % (16 // bits) * bits
    return x / (1 << place).float()


def _several_rows(x: Tensor, words: Tensor, bits: int) -> Tensor:
    """For any number. x float32."""

    def with_restored(x: Tensor, words: Tensor) -> Tensor:
        # [groups, inputs of a group, blocks of outputs, LANES]:
        # what is written lies side by side, as it was read.
        blocks, groups, depth, outputs = words.shape
        in_order = words.permute(1, 2, 0, 3).reshape(groups, depth, blocks * outputs)
        return x @ materialize(_values(in_order, bits).flatten(0, 1))

    def in_loops(x: Tensor, words: Tensor) -> Tensor:
        out: Tensor = torch.ops.kernels_triton_free.code_words_rows.default(x, words, bits)
        return out

    is_many = x.shape[0] > MANY_ROWS
    if isinstance(is_many, bool):
        return (with_restored if is_many else in_loops)(x, words)
    out: Tensor = torch.cond(is_many, with_restored, in_loops, (x, words))
    return out


def _product(x: Tensor, placed: Tensor, added: Tensor, sums: Tensor, words: Tensor, bits: int) -> Tensor:
    codes, scales = codes_in(words, bits)
    scale, zero = scales.double().permute(2, 1, 0).unsqueeze(-1)
    values = (codes.double().unflatten(1, (scale.shape[1], -1)) - 2 ** (bits - 1)) * scale + zero
    return (values.flatten(1) @ x.double()).float()


def _product_shape(
    x: Tensor, placed: Tensor, added: Tensor, sums: Tensor, words: Tensor, bits: int
) -> Tensor:
    return x.new_empty(words.shape[0] * LANES)


def _products(x: Tensor, words: Tensor, bits: int) -> Tensor:
    if bits > 8:
        return x @ floats_in(words, bits).T
    nothing = x.new_empty(0)
    return torch.stack([_product(row, nothing, nothing, nothing, words, bits) for row in x])


def _products_shape(x: Tensor, words: Tensor, bits: int) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0] * LANES)


_library.impl("code_words_row", _product, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::code_words_row", _product_shape, lib=_library)
_library.impl("code_words_rows", _products, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::code_words_rows", _products_shape, lib=_library)
