"""Gated activations of the MLP: act(gate) * up (Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [tokens, 2 * n], gate in the first half -> act(gate) * up [tokens, n].

    activation: "silu", "gelu" or "gelu_pytorch_tanh". Raises ValueError for another one.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return F.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation is {activation!r}, but must be silu, gelu or gelu_pytorch_tanh.")
