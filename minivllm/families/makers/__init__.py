"""The catalogue of families: one file for each maker and kind, and the registry that lists them.

Longer than other folders for a reason: it is a table with a file for each maker. Only the registry imports
the others, so each file is read alone.

May import: families, kernels_triton_free.experts, plugins, specs.
Door: `find_family` in registry.py.
"""
