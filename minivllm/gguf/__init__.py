"""The GGUF format: header, tensors, quantised blocks, and the configuration it carries.

May import: kernels_triton_free, linear.methods, models.registry.
Door: `GGUFFile` in gguf_file.py.
"""
