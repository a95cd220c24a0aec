"""What loops over several rows have in common:
each row of a tile of rows has a sum of its own for every output.

Several sums over the same weights become one loop, in which each weight is read once. Rows are filled up with
zeros, so that any number of them, also a dynamic one, is whole tiles. Blocks of outputs, tiles of rows,
outputs of a block: in this order a block is read once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch


def sum_up(
    terms: Callable[[Any, Any], Any], ranges: list[Any], reduced: list[Any], dtype: torch.dtype
) -> Any:
    """Inductor's sum of terms(index, reduced index), of this dtype, for every index."""
    from torch._inductor.ir import Reduction

    return Reduction.create(
        device=torch.device("cpu"),
        dst_dtype=dtype,
        src_dtype=dtype,
        inner_fn=terms,
        ranges=ranges,
        reduction_ranges=reduced,
        reduction_type="sum",
    )


def rows_together(rows: Any, most: int) -> int:
    """Rows of a tile."""
    return min(int(rows), most) if getattr(rows, "is_number", True) else most


def sum_up_rows(
    x: Any,
    together: int,
    shape: tuple[int, int],
    reduced: list[Any],
    dtype: torch.dtype,
    term: Callable[..., Any],
) -> Any:
    """x [rows, in], in tiles of so many rows -> Inductor's float32 [rows, blocks * outputs].

    shape: blocks, and outputs of each. term(load, row, block, output, reduced index): what is summed up, of
    this dtype; load([row, place]) gives an input.
    """
    from torch._inductor.ir import SliceView, TensorBox
    from torch._inductor.lowering import lowerings, to_dtype
    from torch.utils._sympy.functions import FloorDiv

    (blocks, outputs), rows = shape, x.get_size()[0]
    tiles = FloorDiv(rows + together - 1, together)
    x = lowerings[torch.ops.aten.constant_pad_nd.default](x, [0, 0, 0, tiles * together - rows], 0)
    x.realize()
    load_input = x.make_loader()

    def of_row(row: int) -> Any:
        def own_term(index: Any, reduced_index: Any) -> Any:
            _, block, tile, output = index
            return term(load_input, tile * together + row, block, output, reduced_index)

        return sum_up(own_term, [1, blocks, tiles, outputs], reduced, dtype)

    # Each is stored where it belongs, row by row, as what follows reads it. With sums in the order of the
    # loops a row was read from as many pages as there are blocks, at places that took some arithmetic: two
    # products of 512 rows took 21 ms at best in place of 16, of 16 rows 0.72 in place of 0.53 (two cores of
    # Zen 3).
    width = blocks * outputs
    parts = [of_row(row) for row in range(together)]
    sums = placed(parts, [together], [width, outputs, together * width, 1], [tiles * together, width], dtype)
    own = TensorBox(SliceView.create(sums.data, 0, 0, rows, clamp=False))
    return own if dtype == torch.float32 else to_dtype(own, torch.float32)


def placed(
    parts: list[Any], numbers: list[int], strides: list[Any], shape: list[Any], dtype: torch.dtype
) -> Any:
    """Sums of equal sizes [1, ..., ...] as one tensor of this shape, row by row. numbers: of parts, in as
    many dimensions as their sizes begin with a 1. strides: of [*numbers, ...] within it.

    Inductor would go through the loops as memory lies. Here the loops stay as they are: their order says what
    is read once, the strides where it is stored.
    """
    from torch._inductor.ir import (
        ConcatKernel,
        FixedLayout,
        FlexibleLayout,
        ReinterpretView,
        SliceView,
        StorageBox,
        TensorBox,
    )
    from torch._inductor.virtualized import V

    device, size = torch.device("cpu"), [*numbers, *parts[0].get_size()[len(numbers) :]]
    storage = StorageBox(ConcatKernel(name=None, layout=FixedLayout(device, dtype, size, strides), inputs=[]))
    buffers = []
    for index, part in zip(product(*map(range, numbers)), parts, strict=True):
        place: Any = storage
        for dim, number in enumerate(index):
            place = SliceView.create(place, dim, number, number + 1, clamp=False)
        buffer: Any = ConcatKernel.realize_into(part, place)
        buffer._apply_loop_reordering = _as_they_are
        buffers.append(buffer)
    kernel: Any = storage.data
    kernel.inputs = ConcatKernel.unwrap_storage(buffers)
    kernel.name = V.graph.register_buffer(kernel)
    V.graph.register_operation(kernel)
    by_row = FixedLayout(device, dtype, shape, FlexibleLayout.contiguous_strides(shape))
    return TensorBox(ReinterpretView(data=storage, layout=by_row))


def _as_they_are(
    index_vars: Any, support_vars: Any, sizes: Any, memory_addrs: Any, priority_idx: Any = None
) -> Any:
    """For Inductor: the order of the loops stays what it is."""
    from torch._inductor.ir import inverse_reorder, same_reorder

    order = list(range(len(sizes)))
    return sizes, same_reorder(order), inverse_reorder(order)
