"""Inductor's template of matrix products, for weights that are arguments of compiled code.

By itself Inductor only takes it for weights that are constants of a graph, which it packs while compiling: that would
be a graph for each layer. Here they have been packed before, in the order in which the template's innermost loops read
them, which fixes how many rows, outputs and inputs those take at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

import kernels_triton_free.packed.int4_tiles  # noqa: F401  (defines an operator)
from kernels_triton_free.inductor.patches import try_to_change
from kernels_triton_free.packed.tiles import OUTPUTS

ROWS, INPUTS = 32, 32
"""Two tiles of AMX: with two of OUTPUTS and the four of their products, all eight of its registers are in use."""


@lru_cache(maxsize=1)
def generate_tiled_products() -> None:
    """Have Inductor generate ``tiled_linear`` and ``int4_tiled_linear``. Once per process, before it compiles."""
    try_to_change(_lower_tiled_linear)
    try_to_change(_lower_int4_tiled_linear)


def _lower_tiled_linear() -> None:
    from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmAMX
    from torch._inductor.lowering import lowerings, register_lowering

    @register_lowering(torch.ops.kernels_triton_free.tiled_linear.default, type_promotion_kind=None)
    def lower(x: Any, tiles: Any, bias: Any) -> Any:
        out = _product(CppGemmTemplate, CppMicroGemmAMX, x, tiles)
        return out if bias is None else lowerings[torch.ops.aten.add.Tensor](out, bias)


def _lower_int4_tiled_linear() -> None:
    from torch._inductor.codegen.cpp_gemm_template import CppWoqInt4GemmTemplate
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmWoQInt4Amx
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(torch.ops.kernels_triton_free.int4_tiled_linear.default, type_promotion_kind=None)
    def lower(x: Any, tiles: Any, scale_and_zero: Any, bias: Any, group_size: int) -> Any:
        template: Any = CppWoqInt4GemmTemplate[group_size]
        size = V.graph.add_tensor_constant(torch.tensor(group_size))
        out = _product(template, CppMicroGemmWoQInt4Amx, x, tiles, size, scale_and_zero)
        return out if bias is None else lowerings[torch.ops.aten.add.Tensor](out, bias)


def _product(base: Any, loops: Callable, x: Any, weight: Any, *others: Any) -> Any:
    """Inductor's node for x [rows, in] times weight, whose first dimension is the outputs, or blocks of OUTPUTS."""
    from unittest.mock import patch

    from torch._inductor import ir
    from torch._inductor.codegen import cpp_gemm_template
    from torch._inductor.codegen.cpp_micro_gemm import GemmBlocking

    blocking = GemmBlocking(ROWS, OUTPUTS, INPUTS)

    def innermost_loops(name: str, *_: Any, **__: Any) -> Any:
        """Not those that Inductor would choose: they want another order of the weight."""
        return loops(name, torch.bfloat16, weight.get_dtype(), torch.float32, torch.float32, blocking)

    class Product(base):
        def get_options(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            with patch.object(cpp_gemm_template, "create_micro_gemm", innermost_loops):
                options: dict[str, Any] = super().get_options(*args, **kwargs)
            return options

    x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    inputs = [x, *(ir.ExternKernel.realize_input(argument) for argument in (weight, *others))]
    size = weight.get_size()
    shape = [x.get_size()[0], size[0] * OUTPUTS if len(size) == 3 else size[0]]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), shape)
    threads = cpp_gemm_template.parallel_num_threads()
    return Product(inputs, layout, threads, blocking, name="tiles").generate().output_node()
