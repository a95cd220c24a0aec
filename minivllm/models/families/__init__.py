"""Families of models: what their configurations say becomes layer specs, and their weights get the decoder's names.

May import: models, models.entries.
Door: `Family` in family.py.
"""
