"""Gated delta net (Qwen3-Next, Qwen3.5): what surrounds the gated delta rule."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.norm import rms_norm
from kernels_triton_free.state.gated_delta import gated_delta
from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.state.short_conv import short_conv
from minivllm.models.mixers.scan import Parameters, ScanSteps
from minivllm.specs.layers import GatedDeltaSpec

LENGTH_EPS = 1e-6
"""Of the square of a query's or key's length, before it is divided by it."""


def _inputs(
    spec: GatedDeltaSpec, x: Tensor, conv: Tensor, rows: StateRows, parameters: Parameters
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    x = x.float()
    keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
    qkv, z, rate, decay = x.split([2 * keys + values, values, spec.heads, spec.heads], dim=-1)
    q, k, v = F.silu(short_conv(qkv, conv, rows, parameters["conv1d.weight"])).split(
        [keys, keys, values], dim=-1
    )
    q, k = (_of_length_one(y.unflatten(-1, (spec.key_heads, spec.key_dim))) for y in (q, k))
    log_decay = -parameters["A_log"].exp() * F.softplus(decay + parameters["dt_bias"])
    v, z = (y.unflatten(-1, (spec.heads, spec.value_dim)) for y in (v, z))
    return (q * spec.key_dim**-0.5, k, v, log_decay, rate.sigmoid()), (z,)


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


def _output(
    spec: GatedDeltaSpec, scanned: Tensor, rest: tuple[Tensor, ...], parameters: Parameters
) -> Tensor:
    normed = rms_norm(scanned, parameters["norm.weight"], spec.norm_eps)
    return (normed * F.silu(rest[0])).flatten(1)


GATED_DELTA = ScanSteps(_inputs, gated_delta, _output)
