"""Mixers that keep a state, in plain PyTorch: loops that carry it from token to token. A part of ``reference.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.layer_specs import ShortConvSpec, StateMixerSpec


def short_convolution(x: Tensor, spec: ShortConvSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """A gated short convolution (LFM2): x [tokens, hidden] -> the same shape."""
    b, c, inner = F.linear(x, weights["conv.in_proj.weight"], weights.get("conv.in_proj.bias")).chunk(3, dim=-1)
    state = torch.zeros(spec.taps - 1, spec.channels, dtype=x.dtype)
    out = []
    for token in b * inner:
        state = torch.cat([state, token[None]])
        out.append((state * weights["conv.conv.weight"].T).sum(0) + weights.get("conv.conv.bias", 0))
        state = state[1:]
    return F.linear(c * torch.stack(out), weights["conv.o_proj.weight"], weights.get("conv.o_proj.bias"))


STATE_MIXERS: dict[type[StateMixerSpec], Callable[[Tensor, Any, Mapping[str, Tensor]], Tensor]] = {
    ShortConvSpec: short_convolution
}
"""(what the mixer reads [tokens, hidden], its spec, the layer's weights by name) -> what it gives."""
