"""Mixers that keep a state, in plain PyTorch: loops that carry it from token to token.
A part of ``reference.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.specs.layers import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, StateMixerSpec


def short_convolution(x: Tensor, spec: ShortConvSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """A gated short convolution (LFM2): x [tokens, hidden] -> the same shape."""
    b, c, inner = F.linear(x, weights["conv.in_proj.weight"], weights.get("conv.in_proj.bias")).chunk(
        3, dim=-1
    )
    state = torch.zeros(spec.taps - 1, spec.channels, dtype=x.dtype)
    out = []
    for token in b * inner:
        state = torch.cat([state, token[None]])
        out.append((state * weights["conv.conv.weight"].T).sum(0) + weights.get("conv.conv.bias", 0))
        state = state[1:]
    return F.linear(c * torch.stack(out), weights["conv.o_proj.weight"], weights.get("conv.o_proj.bias"))


def gated_delta_net(x: Tensor, spec: GatedDeltaSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """A gated delta net (Yang et al. 2024): x [tokens, hidden] -> the same shape."""
    own = {name.removeprefix("linear_attn."): tensor for name, tensor in weights.items()}
    q, k, v, z, b, a = (F.linear(x, own[f"in_proj_{part}.weight"]) for part in "qkvzba")
    convolved = F.silu(causal_convolution(torch.cat([q, k, v], dim=-1), own["conv1d.weight"]))
    q, k, v = convolved.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
    q, k = (y.unflatten(-1, (spec.key_heads, spec.key_dim)) for y in (q, k))
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(spec.heads // spec.key_heads, dim=1) for y in (q * spec.key_dim**-0.5, k))
    v, z = (y.unflatten(-1, (spec.heads, spec.value_dim)) for y in (v, z))
    decay, rate = torch.exp(-own["A_log"].exp() * F.softplus(a + own["dt_bias"])), b.sigmoid()

    state = torch.zeros(spec.heads, spec.key_dim, spec.value_dim, dtype=x.dtype)
    out = []
    for token in range(len(x)):
        state = state * decay[token, :, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[token])
        state = state + torch.einsum("hk,hv->hkv", k[token], rate[token, :, None] * (v[token] - known))
        out.append(torch.einsum("hkv,hk->hv", state, q[token]))
    gated = root_mean_square_norm(torch.stack(out), own["norm.weight"], spec.norm_eps) * F.silu(z)
    return F.linear(gated.flatten(1), own["out_proj.weight"])


def mamba2_layer(x: Tensor, spec: Mamba2Spec, weights: Mapping[str, Tensor]) -> Tensor:
    """A Mamba2 layer (Dao and Gu 2024): x [tokens, hidden] -> the same shape."""
    own = {name.removeprefix("mamba."): tensor for name, tensor in weights.items()}
    z, inner, dt = F.linear(x, own["in_proj.weight"], own.get("in_proj.bias")).split(
        [spec.inner, spec.channels, spec.heads], dim=-1
    )
    inner = F.silu(causal_convolution(inner, own["conv1d.weight"], own.get("conv1d.bias")))
    shared = spec.groups * spec.state_dim
    inner, b, c = inner.split([spec.inner, shared, shared], dim=-1)
    inner = inner.unflatten(-1, (spec.heads, spec.head_dim))
    b, c = (
        y.unflatten(-1, (spec.groups, -1)).repeat_interleave(spec.heads // spec.groups, dim=1) for y in (b, c)
    )
    dt = F.softplus(dt + own["dt_bias"])
    decay = torch.exp(-own["A_log"].exp() * dt)

    state = torch.zeros(spec.heads, spec.state_dim, spec.head_dim, dtype=x.dtype)
    out = []
    for token in range(len(x)):
        added = torch.einsum("hs,hd->hsd", b[token], dt[token, :, None] * inner[token])
        state = state * decay[token, :, None, None] + added
        out.append(torch.einsum("hsd,hs->hd", state, c[token]) + own["D"][:, None] * inner[token])
    gated = (torch.stack(out).flatten(1) * F.silu(z)).unflatten(-1, (spec.groups, -1))
    normed = root_mean_square_norm(gated, own["norm.weight"].unflatten(0, (spec.groups, -1)), spec.norm_eps)
    return F.linear(normed.flatten(1), own["out_proj.weight"], own.get("out_proj.bias"))


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each channel of x [tokens, channels] by itself, over so many tokens as weight [channels,
    taps] is wide."""
    taps = weight.shape[1]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    out = sum(weight[:, tap] * padded[tap : tap + len(x)] for tap in range(taps))
    assert isinstance(out, Tensor)
    return out if bias is None else out + bias


def root_mean_square_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


STATE_MIXERS: dict[type[StateMixerSpec], Callable[[Tensor, Any, Mapping[str, Tensor]], Tensor]] = {
    ShortConvSpec: short_convolution,
    GatedDeltaSpec: gated_delta_net,
    Mamba2Spec: mamba2_layer,
}
"""(what the mixer reads [tokens, hidden], its spec, the layer's weights by name) -> what it gives."""
