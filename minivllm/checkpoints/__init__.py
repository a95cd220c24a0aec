"""Files of a model: its configuration and its weights (safetensors, GGUF, or random).

May import: checkpoints.gguf_names, families, families.makers, gguf, plugins, specs, weights.
Door: `iterate_weights` in checkpoint.py, `read_decoder_config` in hf_config.py.
"""
