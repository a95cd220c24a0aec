"""A transformers model traced once and cut at attention into pieces of a program.

May import: compilation, distributed, kernels_triton_free, linear, linear.experts, linear.methods, models,
program, specs.
Door: `TracedModel` in traced.py.
"""
