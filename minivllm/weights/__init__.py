"""Weights as checkpoints store them: names, parts, quantisation formats.

May import: kernels_triton_free.packed, stop_conditions.
Door: `QuantizedWeight` in stored_weight.py, `PackedWeights` in packed_weights.py.
"""
