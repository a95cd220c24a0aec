"""Keys and values of a block in strips, each of which is one cache line:

    K [blocks, kv_heads, block_size / S, D, S]      S tokens side by side, one dimension after the other
    V [blocks, kv_heads, D / S, block_size, S]      S dimensions side by side, one token after the other

Attention of a single token reads every key and value once and computes next to nothing with it, so it should
run at the speed of memory. A score is a sum over D, and what is mixed is a sum over tokens: with strips,
compiled loops take S scores, or S dimensions, in one register and go through whole cache lines in the order
in which they lie in memory. Where a key lies in one piece instead, every score is summed up across a
register, and neighbouring dimensions of V are read in passes that skip from token to token. As in the plain
layout a block is one slice, and takes as many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LINE_BYTES = 64
"""Of a cache line, and of a vector register of AVX-512."""


def strip_size(dtype: torch.dtype) -> int:
    """Values of a strip."""
    return LINE_BYTES // dtype.itemsize


def has_strips(cache: Tensor) -> bool:
    """Whether K or V are stored so; plain ones have four dimensions."""
    return len(cache.shape) == 5


def can_have_strips(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether blocks and keys are whole strips, of a dtype that loops compute with."""
    strip = strip_size(dtype)
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and not (
        block_size % strip or head_dim % strip
    )


def strip_shapes(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a block of K, and of V."""
    strip = strip_size(dtype)
    return (kv_heads, block_size // strip, head_dim, strip), (kv_heads, head_dim // strip, block_size, strip)


def write_strips(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k, v [tokens, kv_heads, D] in place, in the dtype of the cache.
    slots int [tokens]: block * block_size + offset."""
    tokens, kv_heads, dim = k.shape
    size, strip = v_cache.shape[3:]
    block, place = _divided(slots, size)
    run, lane = _divided(place, strip)
    k_cache[block, :, run, :, lane] = k
    v_cache[block, :, :, place] = v.reshape(tokens, kv_heads, dim // strip, strip)


def _divided(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of numbers that are not negative;
    compiled code divides for each value that it stores."""
    if size & (size - 1):
        return numbers // size, numbers % size
    return numbers >> (size.bit_length() - 1), numbers & (size - 1)


def keys_of(strips: Tensor) -> Tensor:
    """K of some blocks -> [kv_heads, blocks * block_size, D], a new tensor."""
    blocks, kv_heads, runs, dim, strip = strips.shape
    return strips.permute(1, 0, 2, 4, 3).reshape(kv_heads, blocks * runs * strip, dim)


def values_of(strips: Tensor) -> Tensor:
    """V of some blocks -> [kv_heads, blocks * block_size, D], a new tensor."""
    blocks, kv_heads, parts, size, strip = strips.shape
    return strips.permute(1, 0, 3, 2, 4).reshape(kv_heads, blocks * size, parts * strip)
