"""Mamba2's state space (Dao and Gu 2024, "Transformers are SSMs"): a linear attention whose state decays.

Each head keeps a state S [state_dim, head_dim]. For every token, with its input x, step size d, b and c:

    S = exp(d A) S + b (d x)       A < 0 is the head's own
    y = S^T c

All in float32. Tokens of a tile are computed together: within it, it is attention without softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels_triton_free.state.tiles import (
    Scanned,
    ScanPlan,
    ScanTiles,
    decay_between,
    scan_rows,
    through_levels,
)


def mamba2(
    x: Tensor,
    step_size: Tensor,
    log_decay: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    read: Tensor,
    write: Tensor,
    plan: ScanPlan | None = None,
) -> Tensor:
    """Outputs [tokens, heads, head_dim]; the states are changed in place.

    x: float32 [tokens, heads, head_dim]. step_size (not below 0), log_decay (step_size times A): float32
    [tokens, heads]. b, c: float32 [tokens, groups, state_dim]; heads is a multiple of groups, and neighbours
    share them. states: float32 [slots, heads, state_dim, head_dim]. read, write: [rows], the slots of the
    state in
    front of each row and behind it. plan: from ``plan_scan``.
    """
    return scan_rows((x * step_size[..., None], log_decay, b, c), states, read, write, plan, _step, _scan)


def _step(inputs: Sequence[Tensor], states: Tensor) -> Scanned:
    x, log_decay, b, c = inputs
    group = x.shape[1] // b.shape[1]
    b, c = (y.repeat_interleave(group, dim=1)[..., None] for y in (b, c))
    states = states * log_decay.exp()[..., None, None] + b * x[..., None, :]
    return (states * c).sum(-2), states


def _scan(inputs: Sequence[Tensor], states: Tensor, tiles: ScanTiles) -> Scanned:
    """Inputs [tiles, 64, …] -> outputs [tiles, 64, heads, head_dim].
    Below, heads are [groups, heads of a group]."""
    x, log_decay, b, c = inputs
    groups = b.shape[2]
    is_token = tiles.is_token[..., None]
    x, log_decay = x.masked_fill(~is_token[..., None], 0.0), log_decay.masked_fill(~is_token, 0.0)
    b, c = b.transpose(1, 2)[:, :, None], c.transpose(1, 2)[:, :, None]  # [tiles, groups, 1, 64, state_dim]
    x, log_decay = (y.transpose(1, 2).unflatten(1, (groups, -1)) for y in (x, log_decay))
    from_start, to_end, between = decay_between(log_decay)
    from_start, to_end = from_start[..., None], to_end[..., None]
    within = (c @ b.mT * between) @ x
    added = (b * to_end).mT @ x
    c, whole = c * from_start, from_start[..., -1:, :]

    def turn(level: slice, states: Tensor) -> Scanned:
        return within[level] + c[level] @ states, states * whole[level] + added[level]

    out, after = through_levels(states.unflatten(1, (groups, -1)), tiles.levels, turn)
    return out.flatten(1, 2).transpose(1, 2), after.flatten(1, 2)
