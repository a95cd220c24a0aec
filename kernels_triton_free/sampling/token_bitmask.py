"""Token masks with one bit per token, as grammars compute them:
32 times smaller than logits on their way over."""

from functools import lru_cache

import torch
from torch import Tensor


def bitmask_words(vocab_size: int) -> int:
    """int32 words of one row."""
    return -(-vocab_size // 32)


def apply_token_bitmask_(logits: Tensor, bitmask: Tensor) -> Tensor:
    """logits [R, V] float, in place -inf where the token's bit in bitmask [R,
    ceil(V / 32)] int32 is not set: bit
    t % 32 of word t // 32 stands for token t. What is NaN stays so.
    Raises ValueError if the shapes do not fit.

    Two passes over the logits' size, vectorised without being compiled: every byte of the mask becomes the
    limits of eight logits, by a table, and the logits the smaller of themselves and those. A shift and a test
    for every token take 20 times as long.
    """
    rows, vocab_size = logits.shape
    if bitmask.shape[0] != rows or bitmask.shape[1] != bitmask_words(vocab_size):
        raise ValueError(
            f"The bitmask is {tuple(bitmask.shape)}, but logits {tuple(logits.shape)} need "
            f"{(rows, bitmask_words(vocab_size))}."
        )
    limits = _limits(logits.dtype, logits.device)[bitmask.view(torch.uint8).int()]
    return torch.minimum(logits, limits.view(rows, -1)[:, :vocab_size], out=logits)


@lru_cache(maxsize=8)
def _limits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8]: for every byte inf where its bit is set, the lowest first, and -inf where it is not."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf).to(dtype=dtype, device=device)
