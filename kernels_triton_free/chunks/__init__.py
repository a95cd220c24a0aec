"""Attention of prompt chunks by products of whole matrices: for CPUs.

May import: kernels_triton_free.strips.
Door: `attend_by_products` in attention.py.
"""
