"""Draft heads that read the hidden states of the model they guess for (EAGLE, EAGLE-3).

May import: checkpoints, compilation, kernels_triton_free, linear, linear.methods, models, models.decoder,
models.mixers, program.
Door: `EagleHead` in head.py.
"""
