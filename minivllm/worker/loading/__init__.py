"""A model on its device: made, filled with weights, and the KV cache that it leaves room for.

May import: batch, checkpoints, compilation, config, device, distributed, graphs, kv_cache, linear, models,
models.decoder, plugins, spec_decode.eagle, specs.
Door: `load_model` in models.py, `ModelLoader` in loader.py, `size_groups` in cache_size.py.
"""
