"""Penalties for tokens that already occurred: presence and frequency (OpenAI), repetition (Keskar et al. 2019)."""

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Lower the logits of tokens that occurred. Returns float32 [R, V]; a logit of -inf stays -inf.

    logits [R, V] float32; prompt_mask [R, V] bool: token is in the prompt; output_counts [R, V] int32: occurrences
    among the generated tokens. presence, frequency, repetition [R] float32.

    First repetition: logits of tokens in prompt or output are divided by it when positive and multiplied when
    negative. Then frequency * count and presence (once) are subtracted; these two look at the output only.
    """
    generated = output_counts > 0
    factor = torch.where(prompt_mask | generated, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * generated
