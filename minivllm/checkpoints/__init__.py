"""What lies in a model's directory: its configuration and its weights (safetensors, GGUF, random ones).

May import: gguf, linear.methods, models, models.entries, models.families, models.registry, weight_formats.
Door: `iterate_weights` in checkpoint.py, `read_decoder_config` in hf_config.py.
"""
