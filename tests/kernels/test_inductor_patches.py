"""What Inductor is told in place of its own answers is what it would have found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from kernels_triton_free.cpu_code.patches import patch_inductor

LOOPS = [sympy.Symbol(f"x{number}", integer=True, nonnegative=True) for number in range(3)]
SIZE = sympy.Symbol("ks0", integer=True, positive=True)

factors = st.sampled_from(
    [*LOOPS, SIZE, sympy.Integer(1), FloorDiv(LOOPS[0], 16), ModularIndexing(LOOPS[0], 1, 8)]
)
terms = st.tuples(st.integers(0, 4096), factors, factors).map(lambda term: term[0] * term[1] * term[2])
indices = st.lists(terms, min_size=1, max_size=4).map(sum).map(sympy.sympify)


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    patch_inductor()


@pytest.mark.skipif(not hasattr(sizevars, "stride_at_vec_range"), reason="PyTorch 2.11 has no such function")
@settings(max_examples=60)
@given(index=indices, loop=st.sampled_from(LOOPS), lanes=st.sampled_from([None, 8, 16]))
def test_strides_are_those_that_inductor_finds(
    index: sympy.Expr, loop: sympy.Symbol, lanes: int | None
) -> None:
    stride = cpp.stride_at_vec_range(index, loop, lanes)
    expected = sizevars.stride_at_vec_range(index, loop, lanes)
    assert sympy.simplify(stride - expected) == 0
    assert stride.is_number == expected.is_number and stride.free_symbols == expected.free_symbols


def test_every_change_fits_this_version_of_pytorch() -> None:
    """In a process of its own: a second time they would find what the first has made. Misfits are logged."""
    code = "from minivllm.compilation.compiler import prepare_inductor; prepare_inductor()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be changed" not in done.stderr


PATCHED = {
    "codecache:AotCodeCompiler.compile": "(cls, graph, wrapper_code, kernel_code, serialized_extern_kernel_nodes, *, device_type, additional_files)",
    "codecache:_precompile_header": "(header, hashable_cmd_line, **compile_command)",
    "codegen.cpp:CppKernel.need_use_acc_helper": "(self, reduction_type, dtype, use_scalar)",
    "codegen.cpp:CppVecKernel._get_vec_load_line": "(self, var, index, dtype, load_mask=None)",
    "codegen.cpp:stride_at_vec_range": "(index, var, vec_length=None)",
    "codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.codegen_allocate_buffer": "(self, buffer_name, buffer_dtype, buffer_size)",
    "codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.keeps_scores": "new",
    "codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.modification": "(self, subgraph_buffer, output_name, output_idx)",
    "codegen.cpp_flex_attention_template:CppFlexAttentionTemplate.transposes_keys": "new",
    "codegen.cpp_flex_attention_template:FLEX_ATTENTION_TEMPLATE": "str",
    "codegen.cpp_flex_attention_template:GemmBlocking": "type",
    "codegen.cpp_flex_attention_template:SOFTMAX_FUSIONS": "str",
    "codegen.cpp_micro_gemm:CppMicroGemmFP32Vec.TEMPLATE_KERNEL": "str",
    "codegen.cpp_wrapper_cpu:CppWrapperCpu.generate_input_output_runtime_checks": "(self)",
    "codegen.cpp_wrapper_cpu_array_ref:CppWrapperCpuArrayRef.get_device_include_path_aot": "(device)",
    "codegen.simd:expr_fits_within_32bit": "(e)",
    "cpp_builder:_get_optimization_cflags": "(cpp_compiler, min_optimize=False)",
    "dtype_propagation:DtypePropagationOpsHandler.__init__": "(self)",
}
"""What is changed in Inductor -> the signature that the change was written for."""
IN_2_11 = {
    "codegen.cpp_wrapper_cpu_array_ref:CppWrapperCpuArrayRef.get_device_include_path": "(device)",
}
NOT_IN_2_11 = {"codegen.cpp_wrapper_cpu_array_ref:CppWrapperCpuArrayRef.get_device_include_path_aot"}


def test_all_that_is_patched_is_there_and_has_the_signature_that_it_was_patched_for() -> None:
    """PyTorch promises neither. A new version that fails here needs a look at the change, and then a new
    entry: `python -m tests.kernels.patched_functions` prints what this version has."""
    program = [sys.executable, "-m", "tests.kernels.patched_functions"]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=root)
    is_2_11 = torch.__version__.startswith("2.11")
    expected = {name: text for name, text in PATCHED.items() if not (is_2_11 and name in NOT_IN_2_11)}
    assert json.loads(done.stdout) == expected | (IN_2_11 if is_2_11 else {})
