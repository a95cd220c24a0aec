"""All changes to Inductor in one call."""

from __future__ import annotations

from kernels_triton_free.cpu_code.loops.packed_rows import generate_packed_row_loops
from kernels_triton_free.cpu_code.loops.whole_number_loops import generate_whole_number_loops
from kernels_triton_free.cpu_code.loops.word_loops import generate_word_loops
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.cpu_code.template import generate_tiled_products


def install() -> None:
    """Change Inductor, once per process and before it compiles; later calls do nothing."""
    patch_inductor()
    generate_tiled_products()
    generate_packed_row_loops()
    generate_word_loops()
    generate_whole_number_loops()
