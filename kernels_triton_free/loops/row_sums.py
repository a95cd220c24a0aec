"""What loops over several rows have in common: each row of a tile of rows has a sum of its own for every output.

Several sums over the same weights become one loop, in which each weight is read once. Rows are filled up with zeros, so
that any number of them, also a dynamic one, is whole tiles. Blocks of outputs, tiles of rows, outputs of a block: in
this order a block is read once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sum_up(terms: Callable[[Any, Any], Any], ranges: list[Any], reduced: list[Any], dtype: torch.dtype) -> Any:
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
    x: Any, together: int, shape: tuple[int, int], reduced: list[Any], dtype: torch.dtype, term: Callable[..., Any]
) -> Any:
    """x [rows, in], in tiles of so many rows -> Inductor's float32 [rows, blocks * outputs].

    shape: blocks, and outputs of each. term(load, row, block, output, reduced index): what is summed up, of this dtype;
    load([row, place]) gives an input.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import ops
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

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

    sums = _side_by_side([of_row(row) for row in range(together)])
    sums.realize()
    load = sums.make_loader()

    def in_order(index: Any) -> Any:
        row, block, output = index
        own = load([ModularIndexing(row, 1, together), block, FloorDiv(row, together), output])
        return own if dtype == torch.float32 else ops.to_dtype(own, torch.float32, src_dtype=dtype)

    size = [rows, blocks, outputs]
    out = Pointwise.create(device=torch.device("cpu"), dtype=torch.float32, inner_fn=in_order, ranges=size)
    return lowerings[torch.ops.aten.view.default](out, [rows, blocks * outputs])


def _side_by_side(parts: list[Any]) -> Any:
    """What ``torch.cat`` would make of Inductor's tensors, where an operator is lowered that is another one."""
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    class Listed:
        """The node that is lowered, with a list as its argument: PyTorch 2.11 takes it for a ``torch.cat``, and asserts
        that it has one, in which it looks for channels that come last."""

        args: tuple[list[Any]] = ([],)

        def __init__(self, node: Any) -> None:
            self._node = node

        def __getattr__(self, name: str) -> Any:
            return getattr(self._node, name)

    if len(parts) == 1:
        return parts[0]
    with V.graph.set_current_node(Listed(V.graph.current_node)):  # type: ignore[arg-type]
        return lowerings[torch.ops.aten.cat.default](parts)
