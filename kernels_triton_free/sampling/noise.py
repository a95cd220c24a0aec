"""Stateless sampling noise: a hash of (seed, position, token id),
so no generator state exists to keep or to lose.

The same three numbers give the same bits on a CPU and on a GPU, eager and compiled, in any batch and in any
order (counter-based random numbers, Salmon et al. 2011). The mixing step is the two-multiplier 32-bit
finaliser with the constants of Chris Wellons' hash prospector, whose bias is the lowest found for this form.
"""

import torch
from torch import Tensor

from kernels_triton_free.compiler.quick_log import quick_log, quick_log1p_of_minus

_FIRST_MULTIPLIER = 0x21F0AAAD
_SECOND_MULTIPLIER = 0x735A2D97
_WORD = 0xFFFFFFFF
# 2^32 divided by the golden ratio, and the same bits as int32: multiples of it spread over all 32 bits.
_GOLDEN = 0x9E3779B9
_GOLDEN_INT32 = _GOLDEN - (1 << 32)
# Starting values of the two keys of a row: the first words of the fractions of sqrt(2) and sqrt(3).
_KEY_STARTS = (0x6A09E667, 0xBB67AE85)


def _mix_word(x: Tensor) -> Tensor:
    """A bijection on 32-bit words held in int64. Both multipliers are below 2^31, so no product overflows."""
    x = x ^ (x >> 16)
    x = (x * _FIRST_MULTIPLIER) & _WORD
    x = x ^ (x >> 15)
    x = (x * _SECOND_MULTIPLIER) & _WORD
    return x ^ (x >> 15)


def _to_int32(word: Tensor) -> Tensor:
    """The same 32 bits [0, 2^32) as a signed int32."""
    return (word - ((word >> 31) << 32)).to(torch.int32)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Absorb all 128 bits of seeds [R] int64 and positions [R] int64 into two independent keys,
    int32 [R] each."""
    words = (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD, (positions >> 32) & _WORD)
    keys = []
    for start in _KEY_STARTS:
        key = torch.full_like(seeds, start)
        for word in words:
            key = _mix_word((key + word) & _WORD)
            # Zero is a fixed point of the mix; the constant leads away from it.
            key = (key + _GOLDEN) & _WORD
        keys.append(_to_int32(key))
    return keys[0], keys[1]


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Uniform bits: seeds, positions [R] int64, token_ids [V] or [R, V] integer -> int32 [R, V],
    every bit usable.

    One key enters before the mix and the other in its middle: two rows that share one of them still differ.
    """
    first_key, second_key = row_keys(seeds, positions)
    # int32 products wrap; half the width of int64 is half the memory traffic and maps to vector multiplies.
    # Token ids differ in their low bits only, which two multiplications alone leave visible between ids 256
    # or more apart; the golden multiple, computed once for all rows, hides it.
    # Ids are never negative, so the mask changes none. It keeps the product out of index expressions:
    # Inductor folds arange times a constant into one, where Triton got a constant beyond int32 for a
    # vocabulary of 128,256.
    x = ((token_ids.to(torch.int32) & 0x7FFFFFFF) * _GOLDEN_INT32) ^ first_key[:, None]
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _FIRST_MULTIPLIER
    x = x ^ second_key[:, None]
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _SECOND_MULTIPLIER
    return x ^ ((x >> 15) & 0x1FFFF)


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of chosen tokens:
    seeds, positions [R] int64, token_ids [V] or [R, V] -> float32 [R, V].

    Always finite, between -2.9 and 22.2. The uniform is taken as 1 - v with v in (0, 1) from 31 bits, because
    floats are dense next to zero: the upper tail, which decides whether unlikely tokens are ever drawn, keeps
    its resolution.
    """
    return -torch.log(-torch.log1p(-_uniform(seeds, positions, token_ids)))


def _uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    v = ((noise_bits(seeds, positions, token_ids) & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return v.clamp(max=1.0 - 2.0**-24)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, *, quick: bool = False) -> Tensor:
    """Gumbel noise of the whole vocabulary: seeds, positions [R] int64 -> float32 [R, vocab_size].

    quick: by polynomials, for compiled code on a CPU; within 2e-6 of what it is otherwise.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    if not quick:
        return gumbel_noise_at(seeds, positions, token_ids)
    return -quick_log(-quick_log1p_of_minus(_uniform(seeds, positions, token_ids)))
