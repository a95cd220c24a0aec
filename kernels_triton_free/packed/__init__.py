"""Weights that oneDNN has packed, read by compiled code: by loops of our own where few rows are multiplied, and with
AMX by products that Inductor generates. For CPUs.

May import: kernels_triton_free.
Door: `few_rows_linear` and `few_rows_products` in rows.py, `tiled_linear` in tiles.py, `memory_of` and `packed_in` in
memory.py.
"""
