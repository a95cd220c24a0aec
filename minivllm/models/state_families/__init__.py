"""Families in which some layers keep a state of fixed size in place of keys and values.

May import: models, models.entries, models.families.
Door: the rows of lfm2.py, which the table of families lists.
"""
