"""What a variant of attention changes, told apart from how it is computed.

May import: kernels_triton_free.strips, models.
Door: `AttentionRule` in rule.py.
"""
