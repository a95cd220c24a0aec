"""Families of models: what their configurations say becomes layer specs, and their weights get the decoder's names.

May import: kernels_triton_free.experts, models, models.entries.
Door: `register_family` in registry.py, `Family` in family.py.
"""
