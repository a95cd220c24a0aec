"""The loops of ``packed.whole_numbers``, as Inductor generates them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

import kernels_triton_free.packed.whole_numbers  # noqa: F401  (defines the operator)
from kernels_triton_free.compiler.changes import try_to_change
from kernels_triton_free.cpu_code.loops.row_sums import rows_together, sum_up_rows

ROWS_TOGETHER = 8
"""Rows with sums of their own in a loop. On two cores of Zen 3 4, 6, 10, 12 and 16 were no faster."""
OUTPUTS_TOGETHER = 16
"""Outputs whose weights stay in the first-level cache for all rows."""


@lru_cache(maxsize=1)
def generate_whole_number_loops() -> None:
    """Have Inductor generate the operator. Once per process, before it compiles."""
    try_to_change(_lower_whole_numbers_product)


def _lower_whole_numbers_product() -> None:
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.kernels_triton_free.whole_numbers_product.default, type_promotion_kind=None)
    def lower(numbers: Any, weight: Any) -> Any:
        out_features, in_features = map(int, weight.get_size())
        load_weight, own_dtype = weight.make_loader(), weight.get_dtype()
        outputs = next(count for count in (OUTPUTS_TOGETHER, 8, 4, 2, 1) if out_features % count == 0)

        def term(load: Any, row: Any, block: Any, output: Any, reduced: Any) -> Any:
            (place,) = reduced
            number = ops.to_dtype(load([row, place]), torch.int32, src_dtype=torch.int16)
            own = load_weight([block * outputs + output, place])
            return ops.mul(number, ops.to_dtype(own, torch.int32, src_dtype=own_dtype))

        together, shape = (
            rows_together(numbers.get_size()[0], ROWS_TOGETHER),
            (out_features // outputs, outputs),
        )
        return sum_up_rows(numbers, together, shape, [in_features], torch.int32, term)
