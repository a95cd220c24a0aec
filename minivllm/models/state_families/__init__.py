"""Families in which some layers keep a state of fixed size in place of keys and values.

May import: kernels_triton_free.experts, models, models.entries, models.expert_families, models.families.
Door: the rows of each module, which the table of families lists.
"""
