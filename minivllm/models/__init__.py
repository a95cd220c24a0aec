"""Models: what the worker needs of one, layers as data, and their arithmetic in plain PyTorch.

May import: compilation, distributed, kernels_triton_free, linear, linear.methods, program, specs, weights.
Door: `Model` in model.py.
"""
