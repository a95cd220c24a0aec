"""One config-driven decoder, cut at attention into regions, and the registry of families.

May import: kernels_triton_free, linear, profiling.
Door: `Decoder` in decoder.py, `register_family` in registry.py.
"""
