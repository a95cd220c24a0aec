"""Llama 3's context extension written out pair by pair, the judge of the vectorised form."""

import math


def llama3_factors(
    dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> list[float]:
    """What Llama 3's context extension divides each of the ``dim / 2`` rotary frequencies by."""
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (index / dim)
        turns = original_context / wavelength  # full turns within the original context
        if turns > high_freq_factor:
            factors.append(1.0)
        elif turns < low_freq_factor:
            factors.append(factor)
        else:
            smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors
