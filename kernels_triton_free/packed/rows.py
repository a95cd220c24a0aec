"""A few rows times a weight that oneDNN has packed, in compiled loops that read it where it lies.

A product of one to four rows does next to nothing but read the weight, so it should run at the speed of
memory. The product of oneDNN does not: on two cores it takes 15 ms for the matrices of SmolLM2-135M and one
row where these loops take 11, and reads experts [1024, 1024] with 11 GB/s where the machine has 28. So
weights are packed once, for products of many rows, and read by both.

On a CPU with AVX512-BF16 oneDNN packs a weight [out, in] of bfloat16 as [out / 64, in / 2, 64, 2]: of 64
outputs each, two inputs at a time; with AMX of 32 outputs, two tiles. Read as int32, [out / 64, in / 2, 64],
every element holds the weights of two neighbouring inputs. bfloat16 is the upper half of a float32, so a
shift and a mask make floats of them, exactly. A row of 64 elements is four vector registers. The loops are
written out for each of the four and for each row of x (see ``cpu_code.loops.packed_rows``), and become one
loop, which loads every element once and goes through memory in order. ``outputs_together`` packs a weight and
looks where its elements have gone: on a CPU that packs otherwise nothing is read this way. Tiles (see
``tiles``) are read as words too, also those of 48 outputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.linear import can_pack, pack_weight
from kernels_triton_free.packed.memory import memory_of

SIDE_BY_SIDE = (64, 32)
"""Outputs that may be packed side by side."""
INPUTS = 32
"""oneDNN pads what is no multiple of it."""
REGISTER = 16
"""int32 of a vector register of AVX-512."""
MAX_ROWS = 4
"""Rows for which the loops are written out: each takes four registers, and reading is still the work."""
UPPER_HALF = -(2**16)

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
# Words come first: Inductor computes arguments in their order, and where the view of a weight came after the
# inputs' conversion, it cut the loops around it into one function more.
_library.define("few_rows_products(Tensor words, Tensor x) -> Tensor")


@lru_cache(maxsize=256)
def outputs_together(out_features: int, in_features: int) -> int:
    """Outputs side by side in a packed weight [out_features, in_features]; 0: ``words_of`` cannot read it."""
    fitting = [count for count in SIDE_BY_SIDE if out_features % count == 0]
    if not fitting or in_features % INPUTS or not can_pack(torch.bfloat16):
        return 0
    weight = torch.zeros(out_features, in_features, dtype=torch.bfloat16)
    bits = (torch.arange(fitting[0] * in_features) % 0x3F7F).to(torch.int16).view(fitting[0], in_features)
    weight[: len(bits)] = weight[-len(bits) :] = bits.view(torch.bfloat16)
    packed = pack_weight(weight)
    if torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
        return 0
    for count in fitting:
        words = memory_of(packed).view(-1, in_features // 2, count)
        ends = (words[0], bits[:count]), (words[-1], bits[-count:])
        if all(torch.equal(found, _as_words(rows)) for found, rows in ends):
            return count
    return 0


def _as_words(bits: Tensor) -> Tensor:
    """bits int16 [outputs, in] -> int32 [in / 2, outputs]."""
    return bits.view(len(bits), -1, 2).transpose(0, 1).contiguous().view(torch.int32).squeeze(-1)


def is_readable(out_features: int, in_features: int) -> bool:
    """Whether ``words_of`` can read a packed weight [out_features, in_features] of bfloat16."""
    return outputs_together(out_features, in_features) > 0


def words_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """The shape of the result of ``words_of``."""
    outputs = outputs_together(out_features, in_features)
    return out_features // outputs, in_features // 2, outputs


def words_of(packed: Tensor) -> Tensor:
    """The memory of a weight from ``pack_weight``, [out, in] of bfloat16, as int32 [out / 64, in / 2, 64], or
    [out / 32, in / 2, 32]: no copy. The weight lives as long as what is returned."""
    return memory_of(packed).view(words_shape(*packed.shape))


def has_single_row(x: Tensor) -> bool:
    """Whether code is compiled for one row."""
    return has_few_rows(x, 1)


def has_few_rows(x: Tensor, most: int = MAX_ROWS) -> bool:
    """Whether code is compiled for the rows of x, and they are so few. A number that varies is no int: to
    compare it would fix the code to one side."""
    return isinstance(x.shape[0], int) and x.shape[0] <= most


def few_rows_linear(x: Tensor, words: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype, with sums in float32.
    To be compiled, for a fixed number of rows.

    words int32 [out / 64, in / 2, 64], or of 48 or 32 outputs: see ``words_of``, ``words_in``. bias [out].
    """
    return few_rows_products(x.unsqueeze(1), words.unsqueeze(0), bias).squeeze(1)


def few_rows_products(x: Tensor, words: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``few_rows_linear``, n products at once: x [rows, n, in] -> [rows, n, out]. bias [n, out].

    words int32 [n, out / 64, in / 2, 64], or of 32.
    Where they are picked from more by an index, compiled code reads them there.
    """
    # Computed before, not again for every block of outputs.
    inputs = materialize(x.float())
    out: Tensor = torch.ops.kernels_triton_free.few_rows_products.default(words, inputs)
    return (out if bias is None else out + bias).to(x.dtype)


def _products(words: Tensor, x: Tensor) -> Tensor:
    rows, products, _ = x.shape
    even, odd = (words << 16).view(torch.float32), (words & UPPER_HALF).view(torch.float32)
    pairs = x.reshape(rows, products, 1, -1, 2, 1)
    return torch.stack([(even * own[:, :, :, 0] + odd * own[:, :, :, 1]).sum(2).flatten(1) for own in pairs])


def _products_shape(words: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], words.shape[1] * words.shape[3])


_library.impl("few_rows_products", _products, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::few_rows_products", _products_shape, lib=_library)
