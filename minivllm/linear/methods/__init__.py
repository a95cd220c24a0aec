"""How the product of a linear layer is computed: over plain, packed and quantised weights.

May import: device, kernels_triton_free, kernels_triton_free.packed, weights.
Door: `LinearMethod` in method.py.
"""
