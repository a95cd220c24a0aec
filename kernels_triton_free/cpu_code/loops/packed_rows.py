"""The loops of ``packed.rows``, as Inductor generates them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kernels_triton_free.compiler.changes import try_to_change
from kernels_triton_free.cpu_code.loops.row_sums import placed, sum_up
from kernels_triton_free.cpu_code.loops.word_loops import bfloat16_pair
from kernels_triton_free.packed.rows import REGISTER


@lru_cache(maxsize=1)
def generate_packed_row_loops() -> None:
    """Have Inductor generate the operator. Once per process, before it compiles."""
    try_to_change(_lower_few_rows_products)


def _lower_few_rows_products() -> None:
    """A sum for each row and each register of outputs, stored where it belongs: nothing is put together
    afterwards."""
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.kernels_triton_free.few_rows_products.default, type_promotion_kind=None)
    def lower(words: Any, x: Any) -> Any:
        rows, (products, blocks, pairs, outputs) = int(x.get_size()[0]), map(int, words.get_size())
        load_input, load_word = x.make_loader(), words.make_loader()

        def of(row: int, register: int) -> Any:
            def term(index: Any, reduced: Any) -> Any:
                (_, _, product, block, lane), (pair,) = index, reduced
                even, odd = bfloat16_pair(load_word([product, block, pair, register * REGISTER + lane]))
                first = ops.mul(even, load_input([row, product, 2 * pair]))
                return ops.add(first, ops.mul(odd, load_input([row, product, 2 * pair + 1])))

            return sum_up(term, [1, 1, products, blocks, REGISTER], [pairs], torch.float32)

        registers, width = outputs // REGISTER, blocks * outputs
        parts = [of(row, register) for row in range(rows) for register in range(registers)]
        strides = [products * width, REGISTER, width, outputs, 1]
        return placed(parts, [rows, registers], strides, [rows, products, width], torch.float32)
