"""Low-rank adapters, several in one batch: each row adds the product with its own adapter's two thin matrices.

After LoRA (Hu et al., 2021), batched as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023), but without a
gather: the A matrices of all adapters are stacked into one, every row is multiplied by all of them, and what does not
belong to the row's own adapter is dropped between the two products. Multiplications and bytes read, for T rows, M
adapters in memory and rank R, per pair of an input and an output feature:

    stacked (here)              T * M * R multiplications, M * R weights read once, two products of fixed shape
    gathered (A[slots] per row) T * R multiplications, T * R weights written and read again
    grouped (sorted by adapter) T * R multiplications, M * R weights read once, M products of changing shape

A decode step is bound by what it reads, and M is smaller than T where batching pays, so stacking reads least; its
shapes never depend on who uses which adapter, so compiled code and captured graphs stay valid. It multiplies M times
too much, which a prefill notices when M * R is no longer small beside the layer's width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def add_low_rank(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, sizes: Sequence[int]) -> Tensor:
    """out [T, sum(sizes)] plus B_s A_s x for every row, s being its adapter; rows with adapter 0 are left as they are.

    x [T, in]. a [parts, M, R, in], b [sum(sizes), M, R]: the matrices of adapters 1 to M, of lower ranks padded with
    zeros, scaling included. slots [T] int: adapter of each row. sizes: output features of each part, stacked in out
    (q, k, v). All entries of b must be finite: a row meets those of other adapters multiplied by zero.
    """
    parts, adapters, rank, _ = a.shape
    hidden = F.linear(x, a.flatten(0, 2)).view(-1, parts, adapters, rank)
    own = slots[:, None] == torch.arange(1, adapters + 1, dtype=slots.dtype, device=slots.device)
    # Replaced and not multiplied by zero: another adapter's product may overflow, and inf * 0 is NaN.
    hidden = torch.where(own[:, None, :, None], hidden, 0.0).flatten(2)
    updates = [F.linear(hidden[:, part], weight) for part, weight in enumerate(b.flatten(1).split(list(sizes)))]
    return out + torch.cat(updates, dim=-1)


def add_low_rank_reference(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, sizes: Sequence[int]) -> Tensor:
    """The same, row by row and part by part."""
    result = out.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        for part, (update, weight) in enumerate(zip(result[row].split(list(sizes)), b.split(list(sizes)))):
            update += weight[:, slot - 1] @ (a[part, slot - 1] @ x[row])
    return result
