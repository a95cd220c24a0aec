"""Low-rank adapters, several in one batch: each row adds the product with its own adapter's two thin matrices.

After LoRA (Hu et al., 2021), batched as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), but by dense
products. The matrices of all adapters lie one behind the other along the rank, so that adapters of different ranks take
what they need and no more: adapter s has the columns ``columns[s, 0]`` to ``columns[s, 1]``. Three forms give the same:

    gathered  every row reads the columns of its own adapter alone, in compiled loops without any product
    stacked   every row meets a whole range of columns, and what is not its own is dropped between the two products
    grouped   the rows of each adapter are gathered and meet the columns of that adapter alone

Gathering costs (rows * highest rank) and no call, which decode steps on a CPU want: packages of compiled code choose it
for few rows. Stacking multiplies (rows * columns in the range) and takes few products of fixed shapes, which captured
graphs want; grouping multiplies (rows * own rank), which a prefill of many adapters wants. Between these two a CPU
operator decides by counting, over the adapters that occur in the batch and no others, and a batch without any costs a
copy. Elsewhere reading on the host who uses what would stall the device, and all columns are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_COST, ROW_COST = 2048, 64
"""What grouping costs in multiplications per feature: for each group its calls, and for each row its way out of the
batch and back (30 µs a group and 20 GB/s, against 100 G multiplications a second over 1500 features in and out)."""

MAX_GATHERED = 2048
"""Rows times ranks up to which compiled loops beat products. Over 30 layers of 3.5 M weights each of them costs 20 to
30 µs per step, and the calls of the products 13 to 21 ms, however few there are (CPU time of one core, 16 rows)."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define(
    "add_low_rank(Tensor out, Tensor x, Tensor a, Tensor b, Tensor columns, Tensor slots, int[] sizes) -> Tensor"
)


class RowAdapters(NamedTuple):
    """Which adapter each row uses. slots int32 [T]: 0 for none. span int32 [R]: 0, 1, 2, …

    R says to compiled code, as a tensor's size, how far its loops go: to no less than the highest rank that occurs.
    """

    slots: Tensor
    span: Tensor

    def of(self, rows: Tensor) -> RowAdapters:
        """Those of some of the rows."""
        return RowAdapters(self.slots[rows], self.span)


def add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, rows: RowAdapters, sizes: Sequence[int]
) -> Tensor:
    """out [T, sum(sizes)] plus B_s A_s x for every row, s being its adapter; rows with adapter 0 are left as they are.

    x [T, in]. a [K, parts, in], b [K, sum(sizes)], scaling included: the matrices of all adapters along the rank.
    columns int32 [M + 1, 2]: first column of each adapter and the one behind its last; equal where it changes nothing,
    as for 0. rows: adapter of each row. sizes: output features of each part, stacked in out (q, k, v). All entries of b
    must be finite: a row may meet those of other adapters multiplied by zero.
    """
    arguments = (out, x, a, b, columns, rows.slots)
    if out.device.type != "cpu":
        return _add_stacked(*arguments, sizes)
    # Plain torch.compile would compile again for other spans: it guards how far its loops may go.
    if not torch.compiler.is_exporting():
        return _add_by_products(*arguments, sizes)
    if out.shape[0] == 1:
        return _add_gathered(*arguments, rows.span, sizes)

    def gather(out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, span: Tensor) -> Tensor:
        return _add_gathered(out, x, a, b, columns, slots, span, sizes)

    def multiply(out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, span: Tensor) -> Tensor:
        return _add_by_products(out, x, a, b, columns, slots, sizes)

    few = out.shape[0] * rows.span.shape[0] <= MAX_GATHERED
    added: Tensor = torch.cond(few, gather, multiply, (*arguments, rows.span))
    return added


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


def _add_gathered(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, span: Tensor, sizes: Sequence[int]
) -> Tensor:
    """add_low_rank in loops over rows, ranks up to len(span) and features. Only worth it compiled."""
    first, end = columns[slots.long()].unbind(1)
    # Ranks come first: Inductor then takes the output features for the dimension to vectorise, which lie side by side.
    column = first + span[:, None]
    is_own = column < end
    column = torch.where(is_own, column, 0)
    hidden = (x[None, :, None].float() * a[column].float()).sum(-1)
    hidden = torch.where(is_own[:, :, None], hidden, 0.0)
    updates = [
        (hidden[:, :, part, None] * weight[column].float()).sum(0)
        for part, weight in enumerate(b.split(list(sizes), dim=1))
    ]
    return (out.float() + torch.cat(updates, dim=1)).to(out.dtype)


def _add_by_products(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    return torch.ops.kernels_triton_free.add_low_rank.default(out, x, a, b, columns, slots, list(sizes))


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
) -> Tensor:
    out = out.clone()
    for group in _plan_of(columns.numpy().tobytes(), slots.numpy().tobytes()):
        if group.rows is None:
            _add_to_group(out, x, a, b, group, sizes)
        else:
            own = out[group.rows]
            _add_to_group(own, x[group.rows], a, b, group, sizes)
            out.index_copy_(0, group.rows, own)
    return out


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


def _low_rank_shape(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    return torch.empty_like(out)


_library.impl("add_low_rank", _add_low_rank_on_cpu, "CPU")
torch.library.register_fake("kernels_triton_free::add_low_rank", _low_rank_shape, lib=_library)
