"""The catalogue of families: one file for each maker and kind, and the registry that lists them.

May import: families, kernels_triton_free.experts, plugins, specs.
Door: `find_family` in registry.py.
"""
