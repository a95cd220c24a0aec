"""Linear layers: their shards, and how their products are computed: plain, int8, int4, fp8, GGUF, AWQ, GPTQ.

May import: device, distributed, kernels_triton_free, kernels_triton_free.packed, linear.methods, weights.
Door: `Linear` in layer.py.
"""
