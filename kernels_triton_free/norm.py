"""Root-mean-square normalisation (Zhang & Sennrich 2019), computed in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, mean_square: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x [..., n] to unit root mean square, then scale by weight [n].

    Computed in float32; returns a tensor like x.
    mean_square: float32 [..., 1], where x is a part of what is normed.
    """
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True) if mean_square is None else mean_square
    wide = wide * torch.rsqrt(mean_square + eps)
    return wide.to(x.dtype) * weight


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """``rms_norm`` without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
