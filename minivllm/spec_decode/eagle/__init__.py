"""EAGLE and MTP heads: checkpoint, configuration, the head as a program, and its drafter.

May import: batch, checkpoints, compilation, config, device, families.makers, gguf, kernels_triton_free,
linear, linear.methods, models, models.decoder, models.mixers, program, spec_decode, specs, weights.
Door: `EagleHead` in head.py.
"""
