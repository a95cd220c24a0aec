"""The experts of a layer: their weights, and how those are multiplied.

May import: compilation, device, distributed, kernels_triton_free, kernels_triton_free.experts,
kernels_triton_free.packed, linear, linear.methods, specs, weights.
Door: `Experts` in experts.py.
"""
