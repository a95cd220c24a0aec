"""Prints, as JSON, what of Inductor is patched: name -> its signature before, without annotations, or its type
if it is no function.

Run in a process of its own, since a patch is found by comparing Inductor before and after.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kernels_triton_free.cpu_code.install import install

MODULES = (
    "config",
    "cpp_builder",
    "codecache",
    "compile_fx",
    "lowering",
    "mkldnn_ir",
    "codegen.cpp",
    "codegen.cpp_flex_attention_template",
    "codegen.cpp_gemm_template",
    "codegen.cpp_grouped_gemm_template",
    "codegen.cpp_micro_gemm",
    "codegen.cpp_utils",
    "codegen.cpp_wrapper_cpu",
    "codegen.cpp_wrapper_cpu_array_ref",
    "codegen.simd",
    "dtype_propagation",
)
"""Of torch._inductor: those that are looked through."""
IN_A_BUILD = (
    "codecache:AotCodeCompiler.compile",
    "codecache:_precompile_header",
    "cpp_builder:_get_optimization_cflags",
)
"""What ``minivllm/compilation/packaged/shared_parts.py`` replaces while it builds a package."""


def attributes() -> Iterator[tuple[str, Any]]:
    """All functions, templates and attributes of classes, by name."""
    for name in MODULES:
        module = import_module(f"torch._inductor.{name}")
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            if isinstance(value, type) and value.__module__ == module.__name__:
                for inner, part in list(vars(value).items()):
                    if not inner.startswith("__") or inner == "__init__":
                        yield f"{name}:{key}.{inner}", part
            elif name != "config" and (callable(value) or isinstance(value, str)):
                yield f"{name}:{key}", value


def described(value: Any) -> str:
    value = getattr(value, "__func__", value)  # of a static or a class method
    if not inspect.isroutine(value):
        return type(value).__name__
    signature = inspect.signature(value)
    # Annotations are written in other ways from version to version.
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def main() -> None:
    before = dict(attributes())
    texts = {name: described(value) for name, value in before.items() if name in IN_A_BUILD}
    known = set(sys.modules)
    install()
    more = {name for name in set(sys.modules) - known if name.startswith("torch._inductor")}
    if more:
        sys.exit(f"these modules are changed as well, perhaps: {sorted(more)}")
    after = dict(attributes())
    changed = [name for name, value in after.items() if before.get(name) is not value]
    texts |= {name: described(before[name]) if name in before else "new" for name in changed}
    print(json.dumps(dict(sorted(texts.items())), indent=4))


if __name__ == "__main__":
    main()
