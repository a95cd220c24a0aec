"""Keys and values in strips of a cache line each, and the attention of single tokens that reads them:
for CPUs.

May import: kernels_triton_free.compiler.
Door: `attend_to_strips` in attention.py.
"""
