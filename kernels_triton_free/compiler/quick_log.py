"""Logarithms as polynomials, which compiled code computes without a call."""

import torch
from torch import Tensor

# log(1 + f) = f P(f) for f between sqrt(1/2) - 1 and sqrt(2) - 1:
# what makes the largest relative error least, by weighted least squares.
P = (
    0.9999999403953552,
    -0.5000036358833313,
    0.33335059881210327,
    -0.24969908595085144,
    0.19900164008140564,
    -0.17250825464725494,
    0.16222593188285828,
    -0.10106925666332245,
)
LN2 = 0.6931471805599453
MANTISSA_BITS = 23
SQRT_HALF = 0x3F3504F3
"""The bits of sqrt(1/2) in float32."""


def quick_log(x: Tensor) -> Tensor:
    """log(x) of float32 that are positive and not subnormal, within 4e-7 of its size,
    or near 1 of the size of x - 1.

    On a CPU a logarithm is a call, around which all vector registers are emptied. Here the exponent is cut
    off so that 1 + f between sqrt(1/2) and sqrt(2) is left, whose logarithm is a polynomial: eight products.
    """
    exponent, f = _split(x)
    return exponent.float() * LN2 + f * _polynomial(f)


def quick_log1p_of_minus(v: Tensor) -> Tensor:
    """log(1 - v) of float32 v from 0 to 1 - 2 ** -24, within 4e-7 of its size, also where v is next to 0."""
    exponent, f = _split(1.0 - v)
    f = torch.where(exponent == 0, -v, f)  # which 1 - v has rounded
    return exponent.float() * LN2 + f * _polynomial(f)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = 2 ** exponent * (1 + f): exponent int32 and f float32."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF) >> MANTISSA_BITS
    return exponent, (bits - (exponent << MANTISSA_BITS)).view(torch.float32) - 1.0


def _polynomial(f: Tensor) -> Tensor:
    value = f * P[-1] + P[-2]
    for factor in P[-3::-1]:
        value = value * f + factor
    return value
