"""Families of models: what their configurations say becomes layer specs, and their weights get the decoder's names.

May import: models.
Door: `register_family` in registry.py, `Family` in family.py.
"""
