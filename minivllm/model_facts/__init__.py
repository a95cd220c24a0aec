"""What the engine must know of a model before it is loaded, from whoever computes it, and who that is.

May import: checkpoints, gguf, models, models.entries, models.registry, weight_formats.
Door: `ModelFacts` in facts.py, `read_model_facts` in choose.py.
"""
