"""Frequencies of a rotary embedding, by its configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.rotary import (
    default_frequencies,
    dynamic_frequencies,
    linear_frequencies,
    llama3_frequencies,
    yarn_frequencies,
)
from minivllm.specs.attention import RotaryConfig


def rotary_frequencies(rotary: RotaryConfig, max_model_len: int) -> Tensor:
    """float64 [dim / 2]. "dynamic" and "longrope" are scaled once, for max_model_len,
    so that chunks and cached blocks agree."""
    dim, theta, factor, original = rotary.dim, rotary.theta, rotary.factor, rotary.original_max_position
    if rotary.type == "default":
        return default_frequencies(dim, theta)
    if rotary.type == "linear":
        return linear_frequencies(dim, theta, factor)
    if rotary.type == "dynamic":
        return dynamic_frequencies(dim, theta, factor, original, max_model_len)
    if rotary.type == "llama3":
        return llama3_frequencies(
            dim, theta, factor, rotary.low_freq_factor, rotary.high_freq_factor, original
        )
    if rotary.type == "proportional":
        frequencies = default_frequencies(dim, theta) / factor
        frequencies[rotary.turned // 2 :] = 0.0
        return frequencies
    if rotary.type == "longrope":
        factors = rotary.long_factors if max_model_len > original else rotary.short_factors
        return default_frequencies(dim, theta) / torch.tensor(factors, dtype=torch.float64)
    return yarn_frequencies(dim, theta, factor, rotary.beta_fast, rotary.beta_slow, original, rotary.truncate)
