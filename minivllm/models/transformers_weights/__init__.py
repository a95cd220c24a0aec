"""From the tensors of a checkpoint to the parameters of a model that transformers builds.

May import: checkpoints, linear.methods, weight_formats.
Door: `CheckpointNames` and `iterate_parameters` in names.py.
"""
