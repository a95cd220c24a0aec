"""Decoders of the transformers library over the engine's blocks: their layers, our attention, cache and products.

May import: compilation, kernels_triton_free, linear, model_facts, models, models.transformers_regions,
models.transformers_weights, profiling.
Door: `TransformersModel` in model.py.
"""
