"""Root-mean-square normalisation (Zhang & Sennrich 2019), computed in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x [..., n] to unit root mean square, then scale by weight [n].

    Computed in float32; returns a tensor like x.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x [tokens, n] to the residual stream and normalise the sum.

    Returns (normalised [tokens, n], new residual [tokens, n]); compiled, both come out of one pass.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
