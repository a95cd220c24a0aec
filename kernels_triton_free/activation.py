"""Gated activations of the MLP: act(gate) * up (Shazeer 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.compiler.quick_silu import quick_silu_product


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [tokens, 2 * n], gate in the first half -> act(gate) * up [tokens, n].

    activation: "silu", "gelu", "gelu_pytorch_tanh" or "relu". Raises ValueError for another one.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gated_product(gate, up, activation)


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As ``gated_activation``, of gate and up [tokens, n] by themselves."""
    if activation == "silu":
        is_quick = (
            gate.dtype == torch.bfloat16 and gate.device.type == "cpu" and torch.compiler.is_compiling()
        )
        return quick_silu_product(gate, up) if is_quick else F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "relu":
        return F.relu(gate) * up
    raise ValueError(f"activation is {activation!r}, but must be silu, gelu, gelu_pytorch_tanh or relu.")


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate_up [tokens, 2 * n], gate in the first half -> (up + 1) * gate * sigmoid(alpha * gate) [tokens,
    n] (gpt-oss).

    gate is at most ``limit`` before that, and up between -limit and limit.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
