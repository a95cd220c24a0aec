"""Which part of a layer whose state is a matrix for every head belongs to one of several workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.linear.layer import Rows, Shard
from minivllm.models.shards import times
from minivllm.specs.layers import GatedDeltaSpec, Mamba2Spec

ScanSpec = GatedDeltaSpec | Mamba2Spec


class OwnScan(NamedTuple):
    """spec: the part as a layer by itself. projections: its rows of each projection. values: its range of the
    output. vectors: its rows of those small weights that are divided."""

    spec: ScanSpec
    projections: Mapping[str, Rows]
    values: slice
    vectors: Mapping[str, Rows]


def own_scan(spec: ScanSpec, shard: Shard) -> OwnScan:
    """That of one worker: some heads, and what they share with no other heads."""
    return _own_delta(spec, shard) if isinstance(spec, GatedDeltaSpec) else _own_mamba2(spec, shard)


def _own_delta(spec: GatedDeltaSpec, shard: Shard) -> OwnScan:
    """Heads of keys, each with the heads of values that it serves."""
    key_heads = shard.own(spec.key_heads)
    heads, keys = times(key_heads, spec.heads // spec.key_heads), times(key_heads, spec.key_dim)
    values, width = times(heads, spec.value_dim), spec.key_heads * spec.key_dim
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    return OwnScan(
        replace(spec, key_heads=_length(key_heads), heads=_length(heads)),
        {f"in_proj_{part}": own for part, own in rows.items()},
        values,
        {"conv1d": _indices((0, keys), (width, keys), (2 * width, values)), "A_log": heads, "dt_bias": heads},
    )


def _own_mamba2(spec: Mamba2Spec, shard: Shard) -> OwnScan:
    """Groups of heads; heads of the only group, whose b and c every worker computes."""
    if spec.groups == 1:
        groups, heads = slice(0, 1), shard.own(spec.heads)
    else:
        groups = shard.own(spec.groups)
        heads = times(groups, spec.heads // spec.groups)
    values, shared, inner = times(heads, spec.head_dim), times(groups, spec.state_dim), spec.inner
    after_b = inner + spec.groups * spec.state_dim
    channels = _indices((0, values), (inner, shared), (after_b, shared))
    into = torch.cat([_indices((0, values)), inner + channels, _indices((inner + spec.channels, heads))])
    of_heads = dict.fromkeys(("A_log", "dt_bias", "D"), heads)
    return OwnScan(
        replace(spec, heads=_length(heads), groups=_length(groups), norms_apart=spec.groups == 1),
        {"in_proj": into},
        values,
        {"conv1d": channels, "conv1d.bias": channels, **of_heads, "norm": values},
    )


def _length(own: slice) -> int:
    return own.stop - own.start


def _indices(*parts: tuple[int, slice]) -> Tensor:
    """Of ranges that begin after so many others."""
    return torch.cat([torch.arange(first + own.start, first + own.stop) for first, own in parts])
