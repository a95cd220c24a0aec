"""Low-rank adapters, several in one batch: each row adds the product with its own adapter's two thin matrices.

After LoRA (Hu et al., 2021), batched as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), but by dense
products. The matrices of all adapters lie one behind the other along the rank, so that adapters of different ranks take
what they need and no more: adapter s has the columns ``columns[s, 0]`` to ``columns[s, 1]``. Two forms give the same:

    stacked   every row meets a whole range of columns, and what is not its own is dropped between the two products
    grouped   the rows of each adapter are gathered and meet the columns of that adapter alone

Stacking multiplies (rows * columns in the range) and takes few products of fixed shapes, which is what a decode step,
compiled code and captured graphs want; grouping multiplies (rows * own rank), which a prefill of many adapters wants.
On a CPU one operator decides by counting, over the adapters that occur in the batch and no others, and a batch without
any costs nothing. Elsewhere reading on the host who uses what would stall the device, and all columns are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_COST, ROW_COST = 2048, 64
"""What grouping costs in multiplications per feature: for each group its calls, and for each row its way out of the
batch and back (30 µs a group and 20 GB/s, against 100 G multiplications a second over 1500 features in and out)."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define(
    "add_low_rank_(Tensor(a!) out, Tensor x, Tensor a, Tensor b, Tensor columns, Tensor slots, int[] sizes) -> ()"
)


def add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """out [T, sum(sizes)] plus B_s A_s x for every row, s being its adapter; rows with adapter 0 are left as they are.

    x [T, in]. a [K, parts, in], b [K, sum(sizes)], scaling included: the matrices of all adapters along the rank.
    columns int32 [M + 1, 2]: first column of each adapter and the one behind its last; equal where it changes nothing,
    as for 0. slots int32 [T]: adapter of each row. sizes: output features of each part, stacked in out (q, k, v). out
    may be overwritten. All entries of b must be finite: a row meets those of other adapters multiplied by zero.
    """
    if out.device.type == "cpu":
        torch.ops.kernels_triton_free.add_low_rank_.default(out, x, a, b, columns, slots, list(sizes))
        return out
    return _add_stacked(out, x, a, b, columns, slots, sizes)


def add_low_rank_reference(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """The same, row by row and part by part."""
    result = out.clone()
    for row, slot in enumerate(slots.tolist()):
        first, end = columns[slot].tolist()
        for part, (update, weight) in enumerate(zip(result[row].split(list(sizes)), b.split(list(sizes), dim=1))):
            update += (a[first:end, part] @ x[row]) @ weight[first:end]
    return result


def _add_stacked(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """add_low_rank in shapes that do not depend on who uses which adapter, over all columns."""
    own = columns[slots.long()]
    column = torch.arange(a.shape[0], dtype=columns.dtype, device=columns.device)
    is_own = (column >= own[:, :1]) & (column < own[:, 1:])
    hidden = F.linear(x, a.flatten(0, 1)).view(x.shape[0], *a.shape[:2])
    # Replaced and not multiplied by zero: another adapter's product may overflow, and inf * 0 is NaN.
    hidden = torch.where(is_own[:, :, None], hidden, 0.0)
    updates = [hidden[:, :, part] @ weight for part, weight in enumerate(b.split(list(sizes), dim=1))]
    return out + torch.cat(updates, dim=-1)


@dataclass(frozen=True)
class RowGroup:
    """Rows that meet the columns ``first`` to ``end`` together.

    rows: int64 [n], None for all. foreign: bool [n, end - first, 1], True for columns that are not the row's own; None
    if all are its own.
    """

    rows: Tensor | None
    first: int
    end: int
    foreign: Tensor | None


def plan_groups(columns: Tensor, slots: Tensor) -> tuple[RowGroup, ...]:
    """Which rows are multiplied by which columns; see add_low_rank for columns int32 [M + 1, 2] and slots int32 [T]."""
    ranges: list[list[int]] = columns.tolist()
    occurring = [slot for slot in slots.unique().tolist() if ranges[slot][0] < ranges[slot][1]]
    if not occurring:
        return ()
    lowest, highest = min(ranges[slot][0] for slot in occurring), max(ranges[slot][1] for slot in occurring)
    first, end = columns[slots.long()].split(1, dim=1)
    superfluous = len(slots) * (highest - lowest) - int((end - first).sum())
    if superfluous > GROUP_COST * len(occurring) + ROW_COST * len(slots):
        return tuple(
            RowGroup((slots == slot).nonzero()[:, 0], ranges[slot][0], ranges[slot][1], None) for slot in occurring
        )
    column = torch.arange(lowest, highest)
    foreign = (column < first) | (column >= end)
    return (RowGroup(None, lowest, highest, foreign[:, :, None] if foreign.any() else None),)


@lru_cache(maxsize=32)
def _plan_of(columns: bytes, slots: bytes) -> tuple[RowGroup, ...]:
    """All layers of a step share one plan, or a few if adapters leave some of them alone."""
    ranges, own = (torch.frombuffer(bytearray(data), dtype=torch.int32) for data in (columns, slots))
    return plan_groups(ranges.view(-1, 2), own)


def _add_low_rank_on_cpu(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> None:
    for group in _plan_of(columns.numpy().tobytes(), slots.numpy().tobytes()):
        if group.rows is None:
            _add_to_group(out, x, a, b, group, sizes)
        else:
            own = out[group.rows]
            _add_to_group(own, x[group.rows], a, b, group, sizes)
            out.index_copy_(0, group.rows, own)


def _add_to_group(out: Tensor, x: Tensor, a: Tensor, b: Tensor, group: RowGroup, sizes: Sequence[int]) -> None:
    """Add to out [n, sum(sizes)], in place, the product of x [n, in] with the columns of a group."""
    a, b = a[group.first : group.end], b[group.first : group.end]
    hidden = torch.mm(x, a.flatten(0, 1).T).view(len(x), len(a), len(sizes))
    if group.foreign is not None:
        # Replaced and not multiplied by zero: another adapter's product may overflow, and inf * 0 is NaN.
        hidden.masked_fill_(group.foreign, 0.0)
    start = 0
    for part, size in enumerate(sizes):
        own = hidden[:, :, part].contiguous()
        out[:, start : start + size].addmm_(own, b[:, start : start + size])
        start += size


def _fake_add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> None:
    """Changes out and makes nothing."""


_library.impl("add_low_rank_", _add_low_rank_on_cpu, "CPU")
torch.library.register_fake("kernels_triton_free::add_low_rank_", _fake_add_low_rank, lib=_library)
