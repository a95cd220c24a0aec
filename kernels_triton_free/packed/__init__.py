"""Weights that oneDNN has packed, read by compiled code: by tiles, or few rows by loops of our own. For CPUs.

May import: kernels_triton_free, kernels_triton_free.compiler, kernels_triton_free.inductor.
Door: `few_rows_linear` and `few_rows_products` in rows.py, `tiled_linear` in tiles.py, `memory_of` in memory.py.
"""
