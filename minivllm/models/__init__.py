"""Models: what the worker needs of one, layers as data, the decoder made of them, and the same in plain PyTorch.

May import: compilation, kernels_triton_free, linear, profiling.
Door: `reference_forward` in reference.py, `Model` in model.py.
"""
