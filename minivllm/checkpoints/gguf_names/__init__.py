"""Names of configuration entries and tensors in GGUF files.

May import: families, families.makers, gguf, kernels_triton_free, specs, weights.
Door: `read_gguf_config` in config.py.
"""
