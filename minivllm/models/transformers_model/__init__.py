"""Decoders of the transformers library over the engine's blocks: their layers, our attention, cache and products.

May import: compilation, distributed, kernels_triton_free, linear, linear.experts, linear.methods, model_facts, models,
models.transformers_plan, models.transformers_products, models.transformers_regions, models.transformers_weights,
profiling.
Door: `TransformersModel` in model.py.
"""
