"""Models that transformers computes, with the attention, linear layers and experts of minivllm.

Annex: plugs in at MODEL_IMPLEMENTATIONS.
May import: compilation, config, distributed, linear, linear.experts, linear.methods, models, profiling,
specs, transformers_models.describe, transformers_models.layers, transformers_models.trace, weights.
Door: `TransformersModel` in model.py.
"""
