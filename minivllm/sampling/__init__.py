"""The next token of each row: sampling state per batch slot, masks, logits processors,
verification of drafts.

May import: batch, compilation, device, kernels_triton_free.sampling, plugins.
Door: `Sampler` in sampler.py.
"""
