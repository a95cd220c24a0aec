"""Models: what the worker needs of one, layers as data, and their arithmetic in plain PyTorch.

May import: compilation, distributed, kernels_triton_free, kernels_triton_free.experts, kernels_triton_free.packed,
kernels_triton_free.state, kernels_triton_free.strips, linear, linear.experts, linear.methods, program,
weight_formats.
Door: `Model` in model.py.
"""
