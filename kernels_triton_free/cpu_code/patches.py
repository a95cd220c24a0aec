"""Changes to Inductor, so that it generates good code for this package, most of them on a CPU.

An operator that is implemented in Python costs compiled code several microseconds a call, hundreds of times a
step: where Inductor has a node for what the operator does, that node stands in for it. Seven things in
FlexAttention's template are changed: it allocates memory to repack all keys and values even where it repacks
none, without AMX it multiplies bfloat16 no faster than float32, in float32 it multiplies queries with keys
one query at a time and transposes the keys anew for each, it takes half a block of keys for a whole one, it
goes through scores that nothing changes twice, and its softmax takes longer steps than it needs. A sum over a
dynamic size stays one loop, so that its size needs no guard, a sum over what an index points to fetches
ahead, one over words fetches them ahead, and AVX2 reads a register of integers at once. The C++
compiler may round a product and the sum it is added to once instead of twice, which is one instruction
instead of two, uses whole registers, and with AVX2 vectorises loops. On a GPU elements are counted in 32 bits
only where that is always enough.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

import kernels_triton_free.compiler.materialize
import kernels_triton_free.compiler.quick_silu
import kernels_triton_free.linear  # noqa: F401  (they define operators)
from kernels_triton_free.compiler.as_one import AS_ONE
from kernels_triton_free.compiler.changes import try_to_change
from kernels_triton_free.cpu_code.build_time import (
    find_strides_without_simplifying,
    include_no_tensor_library,
    leave_out_checks_of_inputs,
    make_rules_of_dtypes_once,
)


@lru_cache(maxsize=1)
def patch_inductor() -> None:
    """Change Inductor, once per process. To be called before anything is compiled."""
    for patch in (
        _contract_products_and_sums,
        _use_whole_vector_registers,
        _let_the_compiler_vectorize,
        _sum_symbolic_sizes_in_one_piece,
        _load_integers_at_once,
        _fetch_ahead_what_is_gathered,
        _fetch_words_ahead,
        _lower_packed_linear,
        _lower_materialize,
        _lower_as_one,
        _allocate_only_what_is_repacked,
        _multiply_bfloat16_without_amx,
        _multiply_several_queries_at_once,
        _transpose_keys_once,
        _transpose_whole_blocks_only,
        _scale_scores_once,
        _take_shorter_steps_in_softmax,
        find_strides_without_simplifying,
        leave_out_checks_of_inputs,
        include_no_tensor_library,
        make_rules_of_dtypes_once,
        _count_in_32_bits_within_bounds,
    ):
        try_to_change(patch)


def _contract_products_and_sums() -> None:
    """Decode of 16 requests took 4 % less on two cores, attention of 32 over strips 6 %;
    few rows gained nothing."""
    from torch._inductor import config

    if config.cpp.enable_floating_point_contract_flag == "off":
        config.cpp.enable_floating_point_contract_flag = "fast"


def _use_whole_vector_registers() -> None:
    """GCC takes half of an AVX-512 register for what it vectorises itself,
    if it is told to generate code for an Intel.

    Inductor turns integers into floats of the same bits through an array on the stack. Written in halves and
    read whole it really goes through memory: one row times packed weights in tiles of 32 outputs took 33 ms
    instead of 15.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        _tell_the_compiler("mprefer-vector-width=512")


def _let_the_compiler_vectorize() -> None:
    """Inductor writes vectors out where it knows how, and tells g++ to vectorise no loop itself. Of integers
    of 16 bits, which loops over whole numbers multiply with AVX2, it knows no vectors. Other compilers are
    told nothing."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        _tell_the_compiler("ftree-loop-vectorize", only_gcc=True)


def _tell_the_compiler(flag: str, only_gcc: bool = False) -> None:
    """Give the C++ compiler one more flag, the last one of those that tell it how to optimise."""
    from torch._inductor import cpp_builder

    flags_of = cpp_builder._get_optimization_cflags

    def with_flag(compiler: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        flags, linker_flags = flags_of(compiler, *args, **kwargs)
        return [*flags, *[flag] * (not only_gcc or cpp_builder._is_gcc(compiler))], linker_flags

    cpp_builder._get_optimization_cflags = with_flag  # type: ignore[assignment]


def _sum_symbolic_sizes_in_one_piece() -> None:
    """Inductor asks whether a sum has more than 4,096 terms,
    and for a dynamic size it makes the answer a guard.

    A size that was marked as dynamic may have no such guard: attention over strips, which sums over the
    blocks of a row, did not compile where a row may read more of them. Without an answer the sum is one loop,
    as it is where Inductor knows that there are fewer terms.
    """
    from torch._inductor.codegen.cpp import CppKernel

    asks = CppKernel.need_use_acc_helper

    def need_use_acc_helper(self: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
        sizes = (self.call_ranges or ())[self.reduction_depth :]
        if reduction_type == "sum" and any(getattr(size, "free_symbols", None) for size in sizes):
            return False
        answer: bool = asks(self, reduction_type, dtype, use_scalar)
        return answer

    CppKernel.need_use_acc_helper = need_use_acc_helper  # type: ignore[method-assign]


def _load_integers_at_once() -> None:
    """Inductor says how many integers a vector load is to take, even where that is all of them. For AVX2,
    which has no registers of masks, PyTorch then copies them to the stack first, in two halves that the CPU
    cannot hand on to a load of the whole: it waits. Loops over codes of 4 bits took twice as long, and
    attention of 512 tokens, whose mask compares positions, 1.15 times as long (two cores of Zen 3)."""
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import cexpr_index

    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    load_line = CppVecKernel._get_vec_load_line

    def at_once(self: Any, var: str, index: Any, dtype: torch.dtype, load_mask: Any = None) -> str:
        line: str = load_line(self, var, index, dtype, load_mask)
        is_whole = dtype in (torch.int32, torch.int64) and self.num_elems == self.tiling_factor
        count = f", {cexpr_index(self.num_elems)})"
        return line.removesuffix(count) + ")" if is_whole and line.endswith(count) else line

    CppVecKernel._get_vec_load_line = at_once  # type: ignore[method-assign]


def _fetch_ahead_what_is_gathered() -> None:
    """Attention over strips reads the blocks of a request, which lie anywhere: 4 KB in one piece, then 4 KB
    elsewhere. What a CPU guesses of the next addresses starts anew with each piece, so every core waits for
    memory most of the time. Where a loop sums up what an index points to, compiled code therefore also asks
    for what the next round of the loop around it will read, and goes on without waiting. Decode attention of
    32 requests took 8 ms a step in place of 13, and of 16 requests 3.2 in place of 4.4 (two cores of Zen 5,
    SmolLM2-135M)."""
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import cexpr_index
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    load_line = CppVecKernel._get_vec_load_line

    def with_fetch(self: Any, var: str, index: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> str:
        line: str = load_line(self, var, index, dtype, *args, **kwargs)
        symbols = getattr(index, "free_symbols", ())  # of an index that is no plain number
        gathered = [symbol for symbol in symbols if symbol_is_type(symbol, SymT.TMP)]
        if not gathered or self.reduction_depth is None or not dtype.is_floating_point:
            return line
        around = self.itervars[: self.reduction_depth]
        steps = [index.coeff(loop) for loop in around] + [index.coeff(symbol) for symbol in gathered]
        step = next((step for step in steps if step.is_Integer and step > self.tiling_factor), None)
        return line if step is None else f"(__builtin_prefetch({var} + {cexpr_index(index + step)}), {line})"

    CppVecKernel._get_vec_load_line = with_fetch  # type: ignore[method-assign]


def _fetch_words_ahead() -> None:
    """A sum that goes through words from front to back (see ``packed.code_words``, ``packed.rows``) does much
    with each of them, so few are on their way at a time, although the CPU guesses that the next ones will be
    read. Where a round of such a sum reads several registers of integers, code asks for every cache line of
    them ahead of time.

    With AVX2, a page ahead: one row times the layers of SmolLM2-135M in 4 bits took 5.8 ms in place of 7.0,
    times its head 2.4 in place of 3.0, with half or twice the distance as much, and a decode step of one
    request 11.8 in place of 14.5 (two cores of Zen 3, in turn).

    With AVX-512, two pages ahead and past the second cache (non-temporal). A word is read once in a step, and
    the Python between two regions finds its code and data in the cache again: that takes 0.4 ms of a step
    where regions compute nothing, about 1 where all weights go through the cache. In bfloat16, a page ahead,
    a decode step of one request took 6.5 ms in place of 7.5 and of four 8.7 in place of 10.5; into all caches
    7.2 and 9.0. Two pages ahead, compared with one, these took 6.3 and 7.9 in place of 6.2 and 8.3, and of
    one request in 4 bits, compared with none, 3.4 in place of 3.7 (two cores of Zen 5, each comparison in
    turn, medians of 3 or 4). With AMX nothing was measured, and nothing is fetched.
    """
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import cexpr_index

    capability, of_line = torch.backends.cpu.get_cpu_capability(), 16  # int32
    if capability == "AVX2":
        ahead, how = 1024, ""
    elif capability == "AVX512" and not torch.cpu._is_amx_tile_supported():
        ahead, how = 2048, ", 0, 0"  # for reading, once
    else:
        return
    load_line = CppVecKernel._get_vec_load_line

    def with_fetch(self: Any, var: str, index: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> str:
        line: str = load_line(self, var, index, dtype, *args, **kwargs)
        is_number = not getattr(index, "free_symbols", ())  # of what is copied together first
        if dtype != torch.int32 or self.reduction_depth is None or is_number:
            return line
        step, place = index.coeff(self.itervars[-1]), index.as_coeff_Add()[0]
        reads_several = step.is_Integer and step > self.tiling_factor
        if not (reads_several and place.is_Integer and place % of_line == 0):
            return line
        return f"(__builtin_prefetch({var} + {cexpr_index(index + ahead)}{how}), {line})"

    CppVecKernel._get_vec_load_line = with_fetch  # type: ignore[method-assign]


def _lower_packed_linear() -> None:
    from torch._inductor import ir, mkldnn_ir
    from torch._inductor.lowering import register_lowering

    # Inductor's own lowering of products over packed weights wants the weight to be a constant of the graph,
    # which would be one graph per layer; the node behind it takes any weight.
    @register_lowering(torch.ops.kernels_triton_free.packed_linear.default, type_promotion_kind=None)
    def packed_linear(x: Any, packed_weight: Any, bias: Any, out_features: int) -> Any:
        x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
        inputs = [x, ir.ExternKernel.realize_input(packed_weight)]
        constants: list[Any] = ["none", [-1], ""]
        if bias is None:
            constants.insert(0, None)
        else:
            inputs.append(ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias)))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], out_features])
        node = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        return ir.TensorBox.create(mkldnn_ir._create_output_node(node))


def _lower_materialize() -> None:
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.kernels_triton_free.materialize.default, type_promotion_kind=None)
    def materialize(x: TensorBox) -> TensorBox:
        x.realize()
        return x


def _lower_as_one() -> None:
    """See ``define_as_one``: the function is traced with few rows, and what it does is lowered operation by
    operation, which leaves nothing to decide between."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.ir import ConcatKernel, TensorBox
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    class Lowered(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            with V.graph.set_current_node(n):
                return super().run_node(n)

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if (
                target is torch.ops.aten.cat.default
            ):  # by itself Inductor writes bytes down first, and copies them
                return TensorBox(ConcatKernel.create(*args))
            return (
                target(*args, **kwargs) if target is operator.getitem else lowerings[target](*args, **kwargs)
            )

    def register(name: str, function: Callable) -> None:
        @register_lowering(getattr(torch.ops.kernels_triton_free, name).default, type_promotion_kind=None)
        def lower(*inputs: TensorBox) -> Any:
            sizes = [
                [int(n) if getattr(n, "is_number", True) else 2 for n in x.get_size()[1:]] for x in inputs
            ]
            examples = [torch.zeros(2, *size, dtype=x.get_dtype()) for size, x in zip(sizes, inputs)]
            return Lowered(make_fx(function, select_decomp_table())(*examples)).run(*inputs)

    for name, function in AS_ONE.items():
        register(name, function)


def _allocate_only_what_is_repacked() -> None:
    """Two system calls a layer less:
    with 400 blocks of 128 tokens, decode of one row took 90 instead of 40 µs."""
    from torch._inductor.codegen.cpp_flex_attention_template import CppFlexAttentionTemplate

    allocate = CppFlexAttentionTemplate.codegen_allocate_buffer

    def codegen_allocate_buffer(self: Any, buffer_name: str, buffer_dtype: Any, buffer_size: str) -> str:
        if buffer_name in ("key_reorder_ptr", "value_reorder_ptr"):
            buffer_size = f"(need_pack ? {buffer_size} : 0)"
        code: str = allocate(self, buffer_name, buffer_dtype, buffer_size)
        return code

    CppFlexAttentionTemplate.codegen_allocate_buffer = codegen_allocate_buffer  # type: ignore[method-assign]


def _multiply_bfloat16_without_amx() -> None:
    """The template repacks keys and values for products of bfloat16 only where there is AMX. oneDNN's kernels
    for such blocks take the same order where a CPU has AVX512-BF16. Attention of 512 tokens took 0.75 ms a
    layer on two cores of Zen 5, in float32 1.52, and by products of whole matrices, which write all scores
    down, 1.65 (SmolLM2-135M)."""
    from torch._inductor.codegen import cpp_flex_attention_template as template

    asks = "at::native::cpublas::could_pack(at::kBFloat16)"
    text: str = template.FLEX_ATTENTION_TEMPLATE
    if text.count(asks) != 1:
        raise AttributeError("FlexAttention's template decides otherwise what it repacks")
    if torch.cpu._is_avx512_bf16_supported():
        template.FLEX_ATTENTION_TEMPLATE = text.replace(asks, "true")


def _multiply_several_queries_at_once() -> None:
    """Keys are transposed for every block of queries, so blocks of one query cost most.

    With blocks of four, a chunk of 512 tokens in float32 took 3.5 instead of 5.0 ms a layer on one core, and
    decode of 16 rows, with its keys in the CPU's cache, 0.10 instead of 0.13 ms. Tiles of more than four
    queries have left these loops since, unless keys or heads fill no whole registers: see
    ``_transpose_keys_once``.
    """
    from torch._inductor.codegen import cpp_flex_attention_template as template

    blocking: Any = template.GemmBlocking

    def at_least_four_rows(block_m: int, block_n: int, block_k: int) -> Any:
        return blocking(max(block_m, 4), block_n, block_k)

    template.GemmBlocking = at_least_four_rows  # type: ignore[assignment,misc]


def _transpose_keys_once() -> None:
    """In float32 the loops over queries and keys transpose the keys in registers, again for every four
    queries. Where a tile has more queries, its keys are transposed into memory that the template allocates
    anyway, and oneDNN multiplies with them, as the template has it multiply with values. Attention of 512
    tokens took 4.6 ms a layer in place of 7.3 (two cores of Zen 3, SmolLM2-135M)."""
    from torch._inductor.codegen import cpp_flex_attention_template as template

    text: str = template.FLEX_ATTENTION_TEMPLATE
    loops = "          {{kernel.kernel_name}}_kernel_micro_gemm_transpose_b<static_cast<bool>(false)>(\n"
    if text.count(loops) != 1:
        raise AttributeError("FlexAttention's template multiplies queries with keys by other loops")

    def transposes_keys(self: Any) -> bool:
        return self.input_dtype == torch.float32

    transposed = """
          constexpr int64_t side = at::vec::Vectorized<float>::size();
          if (cur_qSplitSize > 4 && cur_kvSplitSize % side == 0 && headSize % side == 0) {
            float* keys = transpose_buffer_ptr + ompIdx * kvSplitSize * headSize;
            for (int64_t key = 0; key < cur_kvSplitSize; key += side) {
              for (int64_t dim = 0; dim < headSize; dim += side) {
                at::vec::transpose_mxn<float, side, side>(
                    k_addr + key * kStrideN + dim, kStrideN,
                    keys + dim * cur_kvSplitSize + key, cur_kvSplitSize);
              }
            }
            at::native::cpublas::brgemm(
                cur_qSplitSize, cur_kvSplitSize, headSize, qStrideM, cur_kvSplitSize, cur_kvSplitSize, false,
                q_data + i * qStrideB + j * qStrideH + m * qStrideM, keys, qk_data, need_pack);
          } else
"""
    template.CppFlexAttentionTemplate.transposes_keys = transposes_keys  # type: ignore[attr-defined]
    changed = "{%- if template.transposes_keys() %}" + transposed + "{%- endif %}\n" + loops
    template.FLEX_ATTENTION_TEMPLATE = text.replace(loops, changed)


def _transpose_whole_blocks_only() -> None:
    """Products take 16 keys at a time, and what is left by itself, however few. Where that is 8 keys and AVX2
    has registers of 8, the template takes it for a whole block: it reads 8 keys that are not there, and
    writes their scores over those of other queries. Attention over blocks of 8 keys was wrong on such CPUs,
    in heads of up to 95."""
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmFP32Vec

    text: str = CppMicroGemmFP32Vec.TEMPLATE_KERNEL
    fits = "N % Vectorized::size() == 0 && 24 * BLOCK_M > K"
    if text.count(fits) != 1:
        raise AttributeError("the loops over float32 transpose blocks by another rule")
    CppMicroGemmFP32Vec.TEMPLATE_KERNEL = text.replace(fits, "N % BLOCK_N == 0 && 24 * BLOCK_M > K")


def _scale_scores_once() -> None:
    """Scores are scaled, then changed by the score function, then looked through for the largest: three times
    through more of them than the first cache holds. Where that function gives back what it takes, they are
    scaled on the way to the largest: attention of 512 tokens took 1.14 instead of 1.3 ms a layer on two cores
    with AMX (SmolLM2-135M)."""
    from torch._inductor.codegen import cpp_flex_attention_template as template
    from torch._inductor.ir import InputBuffer

    scaling = (
        "        {{kernel.kernel_name}}_mul_scale_kernel<accum_t>"
        "(qk_data, scaling_factor, cur_qSplitSize*cur_kvSplitSize);\n"
    )
    largest = "              qk_data + row * cur_kvSplitSize,\n              static_cast<accum_t>(1),\n"
    text: str = template.FLEX_ATTENTION_TEMPLATE
    if text.count(scaling) != 1 or text.count(largest) != 1:
        raise AttributeError("FlexAttention's template has other lines where scores are scaled")

    def keeps_scores(self: Any) -> bool:
        return self.score_mod is None or isinstance(self.score_mod.data, InputBuffer)

    modification = template.CppFlexAttentionTemplate.modification

    def without_what_changes_nothing(self: Any, function: Any, *args: Any) -> str:
        code: str = (
            "" if function is self.score_mod and keeps_scores(self) else modification(self, function, *args)
        )
        return code

    text = text.replace(scaling, "{%- if not template.keeps_scores() %}\n" + scaling + "{%- endif %}\n")
    factor = "{{'scaling_factor' if template.keeps_scores() else 'static_cast<accum_t>(1)'}}"
    template.FLEX_ATTENTION_TEMPLATE = text.replace(
        largest, largest.replace("static_cast<accum_t>(1)", factor)
    )
    template.CppFlexAttentionTemplate.keeps_scores = keeps_scores  # type: ignore[attr-defined]
    template.CppFlexAttentionTemplate.modification = without_what_changes_nothing  # type: ignore[method-assign]


def _take_shorter_steps_in_softmax() -> None:
    """Of each row the largest score is found first, and every step waits for the one before. PyTorch's
    ``maximum`` takes four instructions, three of them for NaN; ``clamp_min`` takes one, and a NaN still comes
    out of the sum. To exponentials that are rounded to 16 bits it takes a shorter polynomial, as PyTorch's
    own attention does on a CPU. Attention of 512 tokens took 1.05 instead of 1.28 ms a layer on two cores
    with AMX (SmolLM2-135M)."""
    from torch._inductor.codegen import cpp_flex_attention_template as template

    text: str = template.SOFTMAX_FUSIONS
    changes = {
        "at::vec::maximum(vec_tmp_max, tmp1)": "at::vec::clamp_min(tmp1, vec_tmp_max)",
        "at::vec::maximum(x, y)": "at::vec::clamp_min(x, y)",
        "tmp1.exp_u20()": "c10::is_reduced_floating_point_v<T2> ? tmp1.fexp_u20() : tmp1.exp_u20()",
    }
    for old, new in changes.items():
        if text.count(old) != 1:
            raise AttributeError("FlexAttention's template has another softmax")
        text = text.replace(old, new)
    template.SOFTMAX_FUSIONS = text


def _count_in_32_bits_within_bounds() -> None:
    """Triton kernels count elements in 32 bits if those of the example can be, and make that a guard.

    A size that was marked as dynamic may have no such guard: attention of prompts did not compile, since
    65,536 tiles of 128 queries would have more elements. Where the bounds of the sizes do not prove it,
    elements are counted in 64 bits, as Inductor does for packages.
    """
    from torch._inductor.codegen import simd
    from torch._inductor.virtualized import V

    fits = simd.expr_fits_within_32bit
    most, endless = torch.iinfo(torch.int32).max, 1e20  # as Inductor tells that there is no bound

    def provably_fits(size: Any) -> bool:
        known = V.graph.sizevars.statically_known_true
        if known(size <= most):
            return True
        return not known(size < endless) and fits(size)

    simd.expr_fits_within_32bit = provably_fits  # type: ignore[assignment]
