"""How quantised safetensors checkpoints store a weight: what config.json says of it, and its parts put together.

May import: linear.methods, stop_conditions.
Door: `read_quantization` in quantization_config.py, `PackedWeights` in packed_weights.py.
"""
