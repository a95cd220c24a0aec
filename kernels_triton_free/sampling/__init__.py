"""From logits to token ids: masks, penalties, truncation, stateless noise, draws, log-probabilities.

May import: kernels_triton_free.compiler.
"""
