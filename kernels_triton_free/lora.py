"""Low-rank adapters, several in one batch:
each row adds the product with its own adapter's two thin matrices.

After LoRA (Hu et al., 2021), batched as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), but by
compiled loops and dense products. The matrices of all adapters lie one behind the other along the rank, each
from the start of a chunk of 16 columns on, so that adapters of different ranks take what they need and little
more; the first chunk holds zeros. Adapter s has the columns ``columns[s, 0]`` to ``columns[s, 1]``. Three
forms give the same:

    tiled     up to four rows of one adapter meet one chunk of it, in compiled loops without any product
    stacked   every row meets a whole range of columns, and what is not its own is dropped between
              the two products
    grouped   the rows of each adapter are gathered and meet the columns of that adapter alone

Tiles read each adapter once for four rows and take no call, which decode steps on a CPU want: packages of
compiled code choose them where they are few. Stacking multiplies (rows * columns in the range) and takes few
products of fixed shapes, which captured graphs want; grouping multiplies (rows * own rank), which a prefill
of many adapters wants. Between these two a CPU operator decides by counting, over the adapters that occur in
the batch and no others, and a batch without any costs a copy. Elsewhere reading on the host who uses what
would stall the device, and all columns are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.compiler.materialize import materialize

CHUNK = 16
"""Columns that a tile multiplies, and what the first column of every adapter is a multiple of."""

LANES = 4
"""Rows that share the reading of a chunk. Their sums stay in registers."""

MAX_TILES = 32
"""Up to here compiled loops are taken. Over 30 layers of 3.5 M weights each, 8 tiles took 8 to 13 ms a step
and 16 took 17 ms (two cores); the calls of the products take 13 to 21 ms, however few there are, and then
their multiplications."""

GROUP_COST, ROW_COST = 2048, 64
"""What grouping costs in multiplications per feature: for each group its calls, and for each row its way out
of the batch and back (30 µs a group and 20 GB/s, against 100 G multiplications a second over 1500 features in
and out)."""

_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define(
    "add_low_rank(Tensor out, Tensor x, Tensor a, Tensor b, Tensor columns, Tensor slots, int[] sizes) -> "
    "Tensor"
)


class AdapterTiles(NamedTuple):
    """The products of a batch with its adapters in equal pieces:
    LANES rows or fewer with one chunk of their adapter.

    rows int32 [tiles, lanes]: some repeated where there are fewer. adapters int32 [tiles], 0 for tiles that
    do nothing. chunks int32 [tiles]: which of the adapter's own. places int32 [T, chunks]: tile * lanes +
    lane of every product of each row, -1 for none.
    """

    rows: Tensor
    adapters: Tensor
    chunks: Tensor
    places: Tensor

    def of(self, rows: Tensor) -> AdapterTiles:
        """For a batch of these rows [n] of the batch: what other rows have in a tile is not read."""
        new = torch.zeros(self.places.shape[0], dtype=torch.int64, device=rows.device)
        new = new.scatter(0, rows.long(), torch.arange(rows.shape[0], device=rows.device))
        return self._replace(rows=new[self.rows.long()].int(), places=self.places[rows])


class RowAdapters(NamedTuple):
    """Which adapter each row uses. slots int32 [T]: 0 for none. tiles: for packages of compiled code, which
    choose them if there are no more than MAX_TILES."""

    slots: Tensor
    tiles: AdapterTiles | None = None

    def of(self, rows: Tensor) -> RowAdapters:
        """Those of some of the rows."""
        return RowAdapters(self.slots[rows], None if self.tiles is None else self.tiles.of(rows))


def chunks_of_rank(rank: int) -> int:
    """How many chunks an adapter of this rank takes."""
    return -(-rank // CHUNK)


def lane_width(sizes: Sequence[int], device: torch.device) -> int:
    """How many outputs lie side by side in b before the next column: see add_low_rank. On a CPU those of one
    register, because loops over columns then read memory in order; elsewhere all, which products want."""
    return math.gcd(16, *sizes) if device.type == "cpu" else sum(sizes)


def add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, rows: RowAdapters, sizes: Sequence[int]
) -> Tensor:
    """out [T, sum(sizes)] plus B_s A_s x for every row, s being its adapter;
    rows with adapter 0 are left as they are.

    x [T, in]. a [chunks, 16, parts, in], b [chunks, sum(sizes) / width, 16, width], scaling included: the
    matrices of all adapters along the rank, the outputs of b in pieces of lane_width; chunk 0 is all zeros,
    and so are the columns between an adapter's last and the next chunk. columns int32 [M + 1, 2]: first
    column of each adapter, a multiple of 16, and the one behind its last; equal where it changes nothing, as
    for 0. rows: adapter of each row. sizes: output features of each part, stacked in out (q, k, v). All
    entries of b must be finite: a row may meet those of other adapters multiplied by zero.
    """
    arguments = (out, x, a, b, columns, rows.slots)
    if out.device.type != "cpu":
        return _add_stacked(*arguments, sizes)
    # Plain torch.compile would compile again for other numbers of tiles: it guards how far its loops may go.
    if rows.tiles is None or not torch.compiler.is_exporting():
        return _add_by_products(*arguments, sizes)
    if out.shape[0] == 1:
        return _add_tiled(out, x, a, b, columns, rows.tiles, sizes)

    def by_tiles(
        out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, *tiles: Tensor
    ) -> Tensor:
        return _add_tiled(out, x, a, b, columns, AdapterTiles(*tiles), sizes)

    def by_products(
        out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, *tiles: Tensor
    ) -> Tensor:
        return _add_by_products(out, x, a, b, columns, slots, sizes)

    few = rows.tiles.rows.shape[0] <= MAX_TILES
    added: Tensor = torch.cond(few, by_tiles, by_products, (*arguments, *rows.tiles))
    return added


def _by_column(b: Tensor) -> Tensor:
    """b of some chunks as a matrix [columns, outputs]; a view where the outputs are in one piece."""
    return b.transpose(1, 2).reshape(b.shape[0] * b.shape[2], -1)


def _add_tiled(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, tiles: AdapterTiles, sizes: Sequence[int]
) -> Tensor:
    """add_low_rank in loops over tiles, columns and features. Only worth it compiled.

    What is read again and again is materialised, and nothing else: Inductor would work out rows anew for
    every column, and keep the weights, converted, in memory. Every sum over a tile's rows is its own, so that
    all of them share one loop; what that loop leaves is ordered so that no index but the outputs' is
    contiguous, because Inductor vectorises along the index that most operands have contiguous.
    """
    count, lanes = tiles.rows.shape
    parts = len(sizes)
    first, end = columns[tiles.adapters.long()].unbind(1)
    own = first + CHUNK * tiles.chunks
    chunk = materialize(torch.where(own < end, own // CHUNK, 0))  # an adapter without this layer meets zeros
    inputs = materialize(x[tiles.rows.long()].float())  # [tiles, lanes, in]
    weight = a[chunk.long()].float()  # [tiles, 16, parts, in]
    hidden = [(inputs[:, lane, None, None] * weight).sum(-1) for lane in range(lanes)]
    hidden_of_all = torch.cat(hidden, -1)  # [tiles, 16, lanes * parts]
    updates: list[list[Tensor]] = [[] for _ in range(lanes)]
    for part, own_b in enumerate(b.split([size // b.shape[3] for size in sizes], dim=1)):
        weight = own_b[chunk.long()].float()  # [tiles, pieces, 16, width]
        for lane in range(lanes):
            factor = hidden_of_all[:, None, :, lane * parts + part, None]
            updates[lane].append((factor * weight).sum(2))
    update = torch.cat([piece for pieces in updates for piece in pieces], 1).view(count * lanes, out.shape[1])
    result = out.float()
    for place in tiles.places.unbind(1):
        result = result + torch.where(place[:, None] >= 0, update[place.long().clamp(min=0)], 0.0)
    return result.to(out.dtype)


def _add_by_products(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    return torch.ops.kernels_triton_free.add_low_rank.default(out, x, a, b, columns, slots, list(sizes))


def _add_stacked(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """add_low_rank in shapes that do not depend on who uses which adapter, over all columns."""
    a, b = a.flatten(0, 1), _by_column(b)
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

    rows: int64 [n], None for all. foreign:
    bool [n, end - first, 1], True for columns that are not the row's own; None if all are its own.
    """

    rows: Tensor | None
    first: int
    end: int
    foreign: Tensor | None


def plan_groups(columns: Tensor, slots: Tensor) -> tuple[RowGroup, ...]:
    """Which rows are multiplied by which columns;
    see add_low_rank for columns int32 [M + 1, 2] and slots int32 [T]."""
    ranges: list[list[int]] = columns.tolist()
    occurring = [slot for slot in slots.unique().tolist() if ranges[slot][0] < ranges[slot][1]]
    if not occurring:
        return ()
    lowest, highest = min(ranges[slot][0] for slot in occurring), max(ranges[slot][1] for slot in occurring)
    first, end = columns[slots.long()].split(1, dim=1)
    superfluous = len(slots) * (highest - lowest) - int((end - first).sum())
    if superfluous > GROUP_COST * len(occurring) + ROW_COST * len(slots):
        return tuple(
            RowGroup((slots == slot).nonzero()[:, 0], ranges[slot][0], ranges[slot][1], None)
            for slot in occurring
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


def _add_to_group(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, group: RowGroup, sizes: Sequence[int]
) -> None:
    """Add to out [n, sum(sizes)], in place, the product of x [n, in] with the columns of a group."""
    chunks = slice(group.first // CHUNK, chunks_of_rank(group.end))
    columns = slice(group.first % CHUNK, group.end - group.first // CHUNK * CHUNK)
    a, b = a[chunks].flatten(0, 1)[columns], _by_column(b[chunks])[columns]
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
