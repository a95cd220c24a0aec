"""The options of Inductor that regions are compiled with. All of them are part of every package's key."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        # On a GPU, whether to pad the sides of matrices is decided by the example's number of tokens, which
        # becomes a guard that a dynamic size may not have.
        "shape_padding": False,
    }
)
"""Of all compiled code."""
PACKAGE_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        # Inductor would make precompiled headers for each package: see packaged/shared_parts.py.
        "aot_inductor.precompile_headers": False,
    }
)
"""Of packages besides."""
FIXED_ROWS_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        # What a few rows make on their way are small tensors of known sizes, and to allocate them took 8 % of
        # a step. On the stack, a step of one row took 5.5 ms in place of 5.95 (4 bits, two cores of Zen 4).
        # Inductor does so only up to 100 KB, and where nothing but generated code gets to see them.
        "aot_inductor.allow_stack_allocation": True,
    }
)
"""Of packages for a fixed number of rows besides."""


def described() -> tuple[str, ...]:
    """All options as text, and the compiler that Inductor is told of."""
    tables = (OPTIONS, PACKAGE_OPTIONS, FIXED_ROWS_OPTIONS)
    return (*(repr(sorted(table.items())) for table in tables), f"compiler={find_cpp_compiler()}")


def find_cpp_compiler() -> str | None:
    """The C++ compiler to use: $CXX if it is there, else g++, clang++ or c++, else None."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((name for name in candidates if name and shutil.which(name)), None)
