"""Weights that oneDNN has packed, read by compiled loops of our own where few rows are multiplied: for CPUs.

May import: kernels_triton_free.
Door: `few_rows_linear` and `few_rows_products` in rows.py, `memory_of` and `packed_in` in memory.py.
"""
