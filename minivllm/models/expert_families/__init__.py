"""Families whose layers have experts: which layers, how a router chooses, and what is refused before memory is taken.

May import: kernels_triton_free.experts, models, models.entries, models.families.
Door: `with_experts` in experts.py.
"""
