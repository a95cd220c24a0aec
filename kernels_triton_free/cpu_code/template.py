"""Inductor's template of matrix products, for weights that are arguments of compiled code.

By itself Inductor only takes it for weights that are constants of a graph, which it packs while compiling:
that would be a graph for each layer. Here they have been put in tiles before, in the order in which the
template's innermost loops read them, which fixes how many rows, outputs and inputs those take at a time. With
AMX the innermost loops are generated; without it they are a call of oneDNN's kernel for a block, by the
function of PyTorch that Inductor uses where CPUs multiply float16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

import kernels_triton_free.packed.int4_tiles
import kernels_triton_free.packed.int8_tiles  # noqa: F401  (they define operators)
from kernels_triton_free.compiler.changes import try_to_change
from kernels_triton_free.packed.int8_tiles import TOGETHER
from kernels_triton_free.packed.tiles import AMX_OUTPUTS, OUTPUTS, outputs_of_tiles

AMX_ROWS, INPUTS = 32, 32
"""Two tiles of AMX: with two of AMX_OUTPUTS and the four of their products,
all eight of its registers are in use."""
ROWS = 96
"""oneDNN's kernel for a block of 64 outputs takes six rows at a time: a block of 32 rows leaves two, for
which it loads as much of the weight as for six. The products of 512 rows of SmolLM2-135M took 120 ms in place
of 127 on two cores of Zen 5, medians of three pairs; of 48, 128 and 192 rows, tried once each, none was
better.

More rows than that are cut into an even number of blocks of equal size: 512 rows into six of 86, not five of
96 and one of 32, with which two threads have 288 rows and 224. Those two also divide the rows where they
could not divide the outputs evenly. Medians of four pairs on two cores of Zen 4: a prompt of 512 tokens took
319 ms in place of 340, one of 1,024 tokens 687 in place of 749."""

PARTS_OF_CACHE = 2
"""A slice of a weight takes at most one of so many parts of the second cache. By itself Inductor cuts a
product into slices of inputs whose weight, for 64 outputs, fits into the first cache: there several blocks of
rows would read it again. Up to ROWS rows are one block, so most weights are not cut here, and are read in the
order in which they lie. All products of SmolLM2-135M's layers took, on two cores of Zen 4 (medians of 48
rounds in turn) [ms]: 8 rows 11.9 in place of 13.0, 16 rows 14.0 in place of 17.5, 32 rows 23.9 in place of
26.3, 96 rows 59.3 in place of 62.9; of three larger weights, with 2,048 to 11,008 inputs, 16 rows took 15 %
less. 512 rows take as long either way."""

VNNI_ROWS = 6
"""With four registers of outputs, 24 of 32 registers hold sums."""

BLOCK_IN_PLACE_OF_TILES = r"""
#include <ATen/native/CPUBlas.h>
template <bool accum, bool prefetch = false>
inline void {{kernel_name}}_amx_kernel_{{num_rows}}_{{num_columns}}(
    AMXState&, const {{input_t}}* A, const {{input_t}}* B, {{output_t}}* C,
    int64_t K, int64_t lda, int64_t ldb, int64_t ldc, int64_t last_rows) {
    const int64_t rows = {{num_rows}} - 16 + last_rows;
    at::native::cpublas::brgemm(rows, {{num_columns}} * 16, K, lda, ldb, ldc, accum, A, B, C);
}
"""
"""The call of oneDNN's kernel that stands where Inductor's loops over weights of 4 bits multiply tiles of
AMX."""


@lru_cache(maxsize=1)
def generate_tiled_products() -> None:
    """Have Inductor generate the operators over tiles. Once per process, before it compiles."""
    try_to_change(_lower_tiled_linear)
    try_to_change(_lower_tiled_linear_halves)
    try_to_change(_lower_int4_tiled_linear)
    try_to_change(_lower_int8_tiled_product)
    try_to_change(_lower_int8_tiled_product_halves)


def _lower_tiled_linear() -> None:
    from torch._inductor.codegen import cpp_gemm_template
    from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate
    from torch._inductor.lowering import lowerings, register_lowering

    @register_lowering(torch.ops.kernels_triton_free.tiled_linear.default, type_promotion_kind=None)
    def lower(x: Any, tiles: Any, bias: Any) -> Any:
        outputs, loops = _bfloat16_loops(tiles)
        product = _with_loops(CppGemmTemplate, cpp_gemm_template, loops)
        out = _generate(product, [x, tiles], tiles.get_size()[0] * outputs, _blocking(outputs)).output_node()
        return out if bias is None else lowerings[torch.ops.aten.add.Tensor](out, bias)


def _lower_tiled_linear_halves() -> None:
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.kernels_triton_free.tiled_linear_halves.default, type_promotion_kind=None)
    def lower(x: Any, tiles: Any) -> Any:
        outputs, loops = _bfloat16_loops(tiles)
        return _generate_halves(x, tiles, loops, _blocking(outputs), torch.bfloat16)


def _lower_int4_tiled_linear() -> None:
    from torch._inductor.codegen import cpp_gemm_template
    from torch._inductor.codegen.cpp_gemm_template import CppWoqInt4GemmTemplate
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(torch.ops.kernels_triton_free.int4_tiled_linear.default, type_promotion_kind=None)
    def lower(x: Any, tiles: Any, scale_and_zero: Any, bias: Any, group_size: int) -> Any:
        template: Any = CppWoqInt4GemmTemplate[group_size]
        loops = _loops(_int4_kind(), tiles.get_dtype(), AMX_OUTPUTS)
        product = _with_loops(template, cpp_gemm_template, loops)
        size = V.graph.add_tensor_constant(torch.tensor(group_size))
        inputs, blocking = [x, tiles, size, scale_and_zero], _blocking(AMX_OUTPUTS)
        out = _generate(product, inputs, tiles.get_size()[0], blocking).output_node()
        return out if bias is None else lowerings[torch.ops.aten.add.Tensor](out, bias)


def _lower_int8_tiled_product() -> None:
    from torch._inductor.codegen import cpp_gemm_template
    from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    loops, blocking = _int8_loops()

    @register_lowering(torch.ops.kernels_triton_free.int8_tiled_product.default, type_promotion_kind=None)
    def lower(numbers: Any, tiles: Any) -> Any:
        product = _with_loops(CppGemmTemplate, cpp_gemm_template, loops)
        # The template asks for scales and zeros of both, and leaves them to what follows the product.
        unused = [V.graph.add_tensor_constant(torch.zeros(1)) for _ in range(4)]
        out_features = tiles.get_size()[0] * OUTPUTS
        return _generate(
            product, [numbers, tiles, *unused], out_features, blocking, torch.int32
        ).output_node()


def _lower_int8_tiled_product_halves() -> None:
    from torch._inductor.lowering import register_lowering

    loops, blocking = _int8_loops()

    @register_lowering(
        torch.ops.kernels_triton_free.int8_tiled_product_halves.default, type_promotion_kind=None
    )
    def lower(numbers: Any, tiles: Any) -> Any:
        return _generate_halves(numbers, tiles, loops, blocking, torch.int32)


def _int8_loops() -> tuple[Callable, Any]:
    """The innermost loops over numbers of 8 bits, and the rows,
    outputs and inputs that they take at a time."""
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmAVX512VNNI
    from torch._inductor.codegen.cpp_utils import GemmBlocking

    blocking = GemmBlocking(VNNI_ROWS, OUTPUTS, TOGETHER)

    def innermost_loops(name: str, *_: Any, **__: Any) -> Any:
        return CppMicroGemmAVX512VNNI(name, torch.uint8, torch.int8, torch.int32, torch.int32, blocking)

    return innermost_loops, blocking


def _bfloat16_loops(tiles: Any) -> tuple[int, Callable]:
    """Outputs of these tiles, and the innermost loops over them."""
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroBrgemm, CppMicroGemmAMX, LayoutType

    class BlockOfOneDnn(CppMicroBrgemm):
        def get_b_layout(self) -> Any:
            return LayoutType.VNNI2  # two inputs at a time

    outputs = int(tiles.get_size()[2])
    return outputs, _loops(
        CppMicroGemmAMX if outputs == AMX_OUTPUTS else BlockOfOneDnn, torch.bfloat16, outputs
    )


def _int4_kind() -> Any:
    """Innermost loops that restore a block of a weight of 4 bits,
    and multiply it with AMX or by oneDNN's kernel."""
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmWoQInt4Amx

    class RestoredBlockOfOneDnn(CppMicroGemmWoQInt4Amx):
        TEMPLATE_KERNEL = BLOCK_IN_PLACE_OF_TILES

        def codegen_finalize(self, kernel: Any) -> str:
            return "at::native::cpublas::brgemm_release();"

    return CppMicroGemmWoQInt4Amx if outputs_of_tiles() == AMX_OUTPUTS else RestoredBlockOfOneDnn


def _loops(kind: Any, dtype: torch.dtype, outputs: int) -> Callable:
    """What a template asks for its innermost loops, over weights of this dtype."""

    def innermost_loops(name: str, *_: Any, **__: Any) -> Any:
        return kind(name, torch.bfloat16, dtype, torch.float32, torch.float32, _blocking(outputs))

    return innermost_loops


def _with_loops(template: Any, module: Any, innermost_loops: Callable) -> Any:
    """A template of ``module`` with these innermost loops, not those that Inductor would choose:
    they want another order of the weight."""
    from unittest.mock import patch

    from torch._inductor.codegen.cpp_utils import GemmBlocking

    class Product(template):
        @staticmethod
        def _template_from_string(source: str) -> Any:
            """The template of a group says that sums are of float32."""
            return template._template_from_string(source.replace("acc_buf_dtype", "micro_gemm.compute_dtype"))

        def render(self, *args: Any, **kwargs: Any) -> str:
            with patch.object(module, "create_micro_gemm", innermost_loops):
                code: str = super().render(*args, **kwargs)
            return _in_blocks_of_onednn(code)

        def _cache_blocking(self, num_threads: int) -> Any:
            """Of a number of rows that does not vary;
            else ``_in_blocks_of_onednn`` says the same in the code."""
            rows, outputs, inputs = super()._cache_blocking(num_threads)
            if self.register_blocking.block_m == ROWS and self.m <= ROWS:
                _, registers, together = self.register_blocking
                fitting = torch.cpu.get_capabilities()["l2_cache_size"] // (
                    PARTS_OF_CACHE * together * registers * 2
                )
                inputs = max(inputs, min(self.thread_blocking(num_threads).block_k, fitting))
            return GemmBlocking(rows, outputs, inputs)

    return Product


def _in_blocks_of_onednn(code: str) -> str:
    """The template's code with blocks of rows and slices of inputs that follow from the number of rows (see
    ROWS and PARTS_OF_CACHE), if that varies and the blocks are oneDNN's."""
    fixed, number = f"    constexpr int64_t Mr = {ROWS};\n", _statement("const int64_t M = ", code)
    divided, cached = _statement("mm_get_thread_blocking(", code), _statement("mm_get_cache_blocking<", code)
    if code.count(fixed) != 1 or not number or not cached:
        return code
    fitting = f"std::min<int64_t>(Kt_blocks, L2_cache_size / ({PARTS_OF_CACHE} * Kr * Nr * 2))"
    uncut = f"    if (M <= {ROWS}) Kc_blocks = std::max(Kc_blocks, {fitting});\n"
    code = code.replace(cached, cached + uncut)
    if not divided:  # by a single thread
        return code
    blocks = f"(2 * ((M + {2 * ROWS - 1}) / {2 * ROWS}))"
    equal = f"    const int64_t Mr = M <= {ROWS} ? {ROWS} : (M + {blocks} - 1) / {blocks};\n"
    by_rows = "Mt_blocks = Mr_blocks / 2, Nt_blocks = Nr_blocks, Kt_blocks = Kr_blocks;\n"
    by_rows = f"    if (num_threads == 2 && M > {ROWS} && Nr_blocks % 2) {by_rows}"
    for place, more in ((number, equal), (divided, by_rows)):
        code = code.replace(place, place + more)
    return code.replace(fixed, "")


def _statement(start: str, code: str) -> str:
    """The first statement that starts so on a line of its own, with its ends of line;
    empty: there is none."""
    found = re.search(rf"\n *{re.escape(start)}[^;]*;\n", code)
    return found[0] if found else ""


def _blocking(outputs: int) -> Any:
    from torch._inductor.codegen.cpp_utils import GemmBlocking

    return GemmBlocking(AMX_ROWS if outputs == AMX_OUTPUTS else ROWS, outputs, INPUTS)


def _generate(
    product: Any,
    inputs: list[Any],
    out_features: int,
    blocking: Any,
    dtype: torch.dtype = torch.bfloat16,
    **group: Any,
) -> Any:
    """Inductor's caller of the product of inputs[0] [rows, in], giving [rows, out_features] of this dtype."""
    from torch._inductor import ir
    from torch._inductor.utils import parallel_num_threads

    x, *others = (ir.ExternKernel.realize_input(argument) for argument in inputs)
    x = ir.ExternKernel.require_contiguous(x)  # itself, if it is
    device = torch.device("cpu")
    layout = ir.FixedLayout(device, torch.float32, [x.get_size()[0], out_features])
    template = product([x, *others], layout, parallel_num_threads(), blocking, **group)
    layout.dtype = dtype  # after the constructor, which does not know that sums may be given as they are
    return template.generate()


def _generate_halves(
    x: Any, tiles: Any, loops: Callable, blocking: Any, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Inductor's group of two products of the same rows,
    with what is computed of both in their innermost loops. dtype: of what they give."""
    from torch._inductor import ir
    from torch._inductor.codegen import cpp_grouped_gemm_template
    from torch._inductor.codegen.cpp_grouped_gemm_template import CppGroupedGemmTemplate
    from torch._inductor.lowering import lowerings

    product = _with_loops(CppGroupedGemmTemplate, cpp_grouped_gemm_template, loops)
    blocks, part = tiles.get_size()[0] // 2, lowerings[torch.ops.aten.slice.Tensor]
    x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    group: dict[str, Any] = {"has_bias": (False, False), "act_mapping": {0: x, 1: x}, "gemm_grouped_num": 2}
    halves = [part(tiles, 0, first, first + blocks) for first in (0, blocks)]
    caller = _generate(product, [x, *halves], blocks * blocking.block_n, blocking, dtype, **group)
    both = caller.output_node().data.data
    both.outputs = [ir.MultiOutput(both.layout, both, [(list, place)]) for place in (0, 1)]
    both.layout = ir.MultiOutputLayout(device=x.get_device())
    first, second = map(ir.TensorBox.create, both.outputs)
    return first, second
