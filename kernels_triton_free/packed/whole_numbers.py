"""Rows times a weight of 8 or 10 bits as whole numbers, in compiled loops, for CPUs with AVX2 and no more.

AVX2 has an instruction that multiplies 16 pairs of 16-bit integers and adds neighbouring products, in the
time in which it multiplies and adds 8 pairs of float32. No code here names it: g++ takes it for a loop that
sums up products of such integers, once it may vectorise loops (see ``_let_the_compiler_vectorize`` in
``cpu_code.patches``). So Inductor only has to write that loop, for some rows at once, each with a sum of its
own: a weight is loaded and widened to 16 bits once for all of them.

A weight has one scale per output. Inputs are rounded as they come, to more bits than weights have: each
token's largest becomes the largest number with which no sum can overflow 32 bits. Of 576 inputs and a weight
of 8 bits that is 29,127, nearly 16 bits, so what is lost is lost in rounding weights. With all layers of
SmolLM2-135M, whose weights have 4 bits in groups, rounded to 8 the mean KL divergence was 0.0024 nats per
token over three texts, to 10 bits 0.0002; with its head alone 0.0015 for 8.

At best two cores of Zen 3 made 170 to 190 billion multiplications and additions a second of 16 rows as of
512, float32 of the same weights 85 (compiled loops, 16 rows) and 143 (the library, 512).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize

MOST_INPUTS = 2048
"""Summed up at once: inputs then have 14 bits, with a weight of 8, or 12, with one of 10."""
DTYPES = {8: torch.int8, 10: torch.int16}
"""Of a weight, by its bits."""
LARGEST_SUM, LARGEST_NUMBER = 2**31 - 1, 2**15 - 1
SMALLEST_SCALE = 1e-30
"""Of a token whose inputs are all zero."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("whole_numbers_product(Tensor numbers, Tensor weight) -> Tensor")


class WholeNumbers(NamedTuple):
    """A weight: int8 [out, in], or int16 with numbers of 10 bits, and scales, float32 [parts, out], of the
    parts into which ``parts_of`` divides the inputs."""

    values: Tensor
    scale: Tensor


def can_multiply_whole_numbers() -> bool:
    """Whether this CPU has AVX2 and no more."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def parts_of(in_features: int) -> list[slice]:
    """Ranges of inputs with scales of their own, each of MOST_INPUTS at most."""
    count = -(-in_features // MOST_INPUTS)
    size = -(-in_features // count)
    return [slice(first, min(first + size, in_features)) for first in range(0, in_features, size)]


def largest_weight(dtype: torch.dtype) -> int:
    """The largest magnitude of a number of a weight: -128 or -512."""
    return next(2 ** (bits - 1) for bits, own in DTYPES.items() if own == dtype)


def whole_numbers_linear(x: Tensor, weight: WholeNumbers, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] of the same dtype. bias [out]. To be compiled: by itself it is slow."""
    out: Tensor | None = None if bias is None else bias.float()
    for own, weight_scale in zip(parts_of(x.shape[1]), weight.scale, strict=True):
        part, values = x[:, own].float(), weight.values[:, own]
        largest = min(LARGEST_NUMBER, LARGEST_SUM // (largest_weight(values.dtype) * values.shape[1]))
        # Computed before, not again for every number.
        scale = materialize((part.abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_SCALE))
        numbers = (part * materialize(1 / scale)).round().to(torch.int16)
        product = torch.ops.kernels_triton_free.whole_numbers_product.default(numbers, values)
        product = product * (scale * weight_scale)
        out = product if out is None else out + product
    assert out is not None
    return out.to(x.dtype)


def _product(numbers: Tensor, weight: Tensor) -> Tensor:
    return (numbers.double() @ weight.double().T).float()


def _product_shape(numbers: Tensor, weight: Tensor) -> Tensor:
    return numbers.new_empty(numbers.shape[0], weight.shape[0], dtype=torch.float32)


_library.impl("whole_numbers_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::whole_numbers_product", _product_shape, lib=_library)
