"""Models: what the worker needs of one, the decoder that is one, and the same arithmetic in plain PyTorch.

May import: compilation, kernels_triton_free, linear, profiling.
Door: `reference_forward` in reference.py, `Model` in model.py, `register_family` in registry.py.
"""
