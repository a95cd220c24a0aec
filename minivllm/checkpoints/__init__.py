"""Files of a model: its configuration and its weights (safetensors, GGUF, or random).

May import: gguf, linear.methods, models, models.entries, models.families, models.registry, weight_formats.
Door: `iterate_weights` in checkpoint.py, `read_decoder_config` in hf_config.py.
"""
