"""Compiled loops that multiply rows with weights on CPUs: over codes and floats in words, and over whole numbers.

May import: kernels_triton_free.compiler, kernels_triton_free.inductor, kernels_triton_free.packed.
Door: `code_words_linear` in code_words.py, `whole_numbers_linear` in whole_numbers.py.
"""
