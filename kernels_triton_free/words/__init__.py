"""Weights in the order in which compiled loops read them, for CPUs: codes and floats in words.

May import: kernels_triton_free.compiler, kernels_triton_free.inductor, kernels_triton_free.packed.
Door: `code_words_linear` in code_words.py.
"""
