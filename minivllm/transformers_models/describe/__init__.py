"""Facts and tensor names of a transformers model: read without building it.

May import: checkpoints, families, weights.
Door: `TransformersConfig` in config.py, `CheckpointNames` in names.py.
"""
