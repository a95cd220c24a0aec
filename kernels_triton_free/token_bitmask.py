"""Token masks with one bit per token, as grammars compute them: 32 times smaller than logits on their way over."""

import torch
from torch import Tensor


def bitmask_words(vocab_size: int) -> int:
    """int32 words of one row."""
    return -(-vocab_size // 32)


def unpack_token_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """bitmask [R, W] int32 -> bool [R, vocab_size]: bit t % 32 of word t // 32 says whether token t may come."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask[:, :, None] >> shifts) & 1
    return bits.reshape(bitmask.shape[0], -1)[:, :vocab_size] != 0


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """logits [R, V] any float dtype, -inf where the token's bit in bitmask [R, ceil(V / 32)] int32 is not set.

    Eager reference for every device; one fused loop once compiled. Raises ValueError if the shapes do not fit.
    """
    rows, vocab_size = logits.shape
    if bitmask.shape[0] != rows or bitmask.shape[1] != bitmask_words(vocab_size):
        raise ValueError(
            f"The bitmask is {tuple(bitmask.shape)}, but logits {tuple(logits.shape)} need "
            f"{(rows, bitmask_words(vocab_size))}."
        )
    # where is a vector loop on a CPU; masked_fill branches at every element.
    return torch.where(unpack_token_bitmask(bitmask, vocab_size), logits, -torch.inf)
