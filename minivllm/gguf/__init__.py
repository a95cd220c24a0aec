"""The GGUF format: header, tensors, quantised blocks, and the configuration it carries.

May import: weights.
Door: `GGUFFile` in gguf_file.py.
"""
