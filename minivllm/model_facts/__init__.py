"""Facts about a model that the engine needs before loading it, and the choice of its implementation.

May import: checkpoints, gguf, models, models.entries, models.registry, weight_formats.
Door: `ModelFacts` in facts.py, `read_model_facts` in choose.py.
"""
