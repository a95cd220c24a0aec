"""Mamba2 (Granite 4): what surrounds its state space."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.norm import rms_norm
from kernels_triton_free.state.mamba2 import mamba2
from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.state.short_conv import short_conv
from minivllm.models.mixers.scan import Parameters, ScanSteps
from minivllm.specs.layers import Mamba2Spec


def _inputs(
    spec: Mamba2Spec, x: Tensor, conv: Tensor, rows: StateRows, parameters: Parameters
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    shared = spec.groups * spec.state_dim
    z, xbc, dt = x.float().split([spec.inner, spec.inner + 2 * shared, spec.heads], dim=-1)
    xbc = F.silu(short_conv(xbc, conv, rows, parameters["conv1d.weight"], parameters.get("conv1d.bias")))
    inner, b, c = xbc.split([spec.inner, shared, shared], dim=-1)
    inner = inner.unflatten(-1, (spec.heads, spec.head_dim))
    b, c = (y.unflatten(-1, (spec.groups, spec.state_dim)) for y in (b, c))
    step_size = F.softplus(dt + parameters["dt_bias"])
    log_decay = -parameters["A_log"].exp() * step_size
    return (inner, step_size, log_decay, b, c), (inner * parameters["D"][:, None], z)


def _output(spec: Mamba2Spec, scanned: Tensor, rest: tuple[Tensor, ...], parameters: Parameters) -> Tensor:
    skipped, z = rest
    out = (scanned + skipped).flatten(1) * F.silu(z)
    if spec.norms_apart:
        return out
    out = out.unflatten(-1, (spec.groups, -1))
    weight = parameters["norm.weight"].unflatten(0, (spec.groups, -1))
    return rms_norm(out, weight, spec.norm_eps).flatten(1)


MAMBA2 = ScanSteps(_inputs, mamba2, _output)
