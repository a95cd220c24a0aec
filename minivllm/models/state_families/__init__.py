"""Families in which some layers keep a state of fixed size in place of keys and values.

May import: models, models.entries, models.families.
Door: `FAMILIES` in lfm2.py.
"""
