"""Formats of quantised safetensors checkpoints: the entry in config.json, and the parts of a weight.

May import: linear.methods, stop_conditions.
Door: `read_quantization` in quantization_config.py, `PackedWeights` in packed_weights.py.
"""
