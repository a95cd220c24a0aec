"""Rotary position embedding (Su et al. 2021) and the ways to stretch it over longer contexts.

Frequencies are computed once in float64 and kept as a table of cosines and sines by position,
so that a compiled region only gathers rows.
"""

import math

import torch
from torch import Tensor


def default_frequencies(dim: int, theta: float) -> Tensor:
    """Rotation per position of each pair of elements: theta^(-2i/dim), float64 [dim / 2]."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def linear_frequencies(dim: int, theta: float, factor: float) -> Tensor:
    """Position interpolation (Chen et al. 2023): positions divided by factor. float64 [dim / 2]."""
    return default_frequencies(dim, theta) / factor


def dynamic_frequencies(dim: int, theta: float, factor: float, original_length: int, length: int) -> Tensor:
    """NTK-aware scaling of the base for a context of ``length`` tokens; unscaled up to original_length.
    [dim / 2]."""
    length = max(length, original_length)
    scale = (factor * length / original_length) - (factor - 1)
    return default_frequencies(dim, theta * scale ** (dim / (dim - 2)))


def llama3_frequencies(
    dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> Tensor:
    """Llama 3.1: long wavelengths divided by factor, short ones kept, a linear blend between.
    float64 [dim / 2]."""
    frequencies = default_frequencies(dim, theta)
    turns = original_length * frequencies / (2 * math.pi)
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_length: int,
    truncate: bool,
) -> Tensor:
    """YaRN (Peng et al. 2023): pairs that turn often enough are kept, slow ones interpolated.
    float64 [dim / 2]."""

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    frequencies = default_frequencies(dim, theta)
    return frequencies * (1 - interpolated) + frequencies / factor * interpolated


def rotary_table(frequencies: Tensor, max_positions: int, attention_factor: float = 1.0) -> Tensor:
    """Cosines, then sines, of every position: float32 [max_positions, 2 * len(frequencies)]."""
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor).float()


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the leading elements of each head; the two halves of the rotated part form the pairs.

    x [tokens, ..., head_dim]; cos_sin float32 [tokens, dim] as rows of rotary_table, dim <= head_dim.
    Returns a tensor like x; computed in float32.
    """
    half = cos_sin.shape[-1] // 2
    shape = (cos_sin.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = cos_sin[:, :half].reshape(shape), cos_sin[:, half:].reshape(shape)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    # Each half is rounded by itself: compiled code would write down what ``cat`` gives in float32,
    # and round that.
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)
