"""The GGUF format: header, tensors, quantised blocks, and the configuration it carries.

May import: kernels_triton_free, linear, models.registry.
Door: `GGUFFile` in gguf_file.py.
"""
