"""Layers of a transformers model that are replaced or divided: attention, linear layers, experts, stages.

May import: distributed, kernels_triton_free, linear, linear.experts, linear.methods, models, specs,
transformers_models.trace, weights.
Door: `Division` in division.py.
"""
