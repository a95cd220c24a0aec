"""Parts of families: what differs between them, entries of config.json, rotary tables, experts.

May import: kernels_triton_free.experts, specs.
Door: `Family` in family.py.
"""
