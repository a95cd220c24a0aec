"""The gated delta rule (Yang et al.
2024, "Gated Delta Networks"): a linear attention that overwrites what it knows.

Each head keeps a state S [key_dim, value_dim].
For every token, with its key k, query q, value v, decay a and rate b:

    S = a S                        forget a little
    S = S + k (b (v - S^T k))      write what the state does not yet answer to this key
    o = S^T q                      read

All in float32. Tokens of a tile are computed together: what each one writes depends on what those before it
wrote, which is a triangular system of 64 equations (the WY form of Yang et al. 2024, "Parallelizing linear
transformers with the delta rule").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton_free.state.tiles import (
    Scanned,
    ScanPlan,
    ScanTiles,
    decay_between,
    scan_rows,
    through_levels,
)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    states: Tensor,
    read: Tensor,
    write: Tensor,
    plan: ScanPlan | None = None,
) -> Tensor:
    """Outputs [tokens, heads, value_dim]; the states are changed in place.

    q, k: float32 [tokens, key_heads, key_dim], k of length 1 and q with its scale. v: float32
    [tokens, heads, value_dim]; heads is a multiple of key_heads, and neighbours share a key. log_decay (at
    most 0), rate (0 to 1): float32 [tokens, heads]. states: float32 [slots, heads, key_dim, value_dim]. read,
    write: [rows], the slots of the state in front of each row and behind it. plan: from ``plan_scan``.
    """
    return scan_rows((q, k, v, log_decay, rate), states, read, write, plan, _step, _scan)


def _step(inputs: Sequence[Tensor], states: Tensor) -> Scanned:
    q, k, v, log_decay, rate = inputs
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1)[..., None] for x in (q, k))
    states = states * log_decay.exp()[..., None, None]
    written = (v - (states * k).sum(-2)) * rate[..., None]
    states = states + k * written[..., None, :]
    return (states * q).sum(-2), states


def _scan(inputs: Sequence[Tensor], states: Tensor, tiles: ScanTiles) -> Scanned:
    """Inputs [tiles, 64, …] -> outputs [tiles, 64, heads, value_dim]. Below, heads are [key_heads, group]."""
    q, k, v, log_decay, rate = inputs
    key_heads = k.shape[2]
    log_decay, rate = (x.masked_fill(~tiles.is_token[..., None], 0.0) for x in (log_decay, rate))
    q, k = q.transpose(1, 2)[:, :, None], k.transpose(1, 2)[:, :, None]  # [tiles, key_heads, 1, 64, key_dim]
    v, log_decay, rate = (x.transpose(1, 2).unflatten(1, (key_heads, -1)) for x in (v, log_decay, rate))
    from_start, to_end, between = decay_between(log_decay)
    from_start, to_end, rate = from_start[..., None], to_end[..., None], rate[..., None]

    # Token i writes what its value differs by from the answer of the state, to which all tokens before it
    # have written. What they write is solved for twice: for an empty state in front of the tile, and per unit
    # of that state.
    system = k @ k.mT * between * rate
    sides = torch.cat([v * rate, k * from_start * rate], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, against_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.mT * between
    q, k, whole = q * from_start, (k * to_end).mT, from_start[..., -1:, :]

    def turn(level: slice, states: Tensor) -> Scanned:
        written = own[level] - against_state[level] @ states
        out = q[level] @ states + scores[level] @ written
        return out, states * whole[level] + k[level] @ written

    out, after = through_levels(states.unflatten(1, (key_heads, -1)), tiles.levels, turn)
    return out.flatten(1, 2).transpose(1, 2), after.flatten(1, 2)
