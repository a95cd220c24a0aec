"""Families that keep one latent of a token in the place of keys and values.

May import: kernels_triton_free.experts, models, models.entries, models.expert_families, models.families.
"""
