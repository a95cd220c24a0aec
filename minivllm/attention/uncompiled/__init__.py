"""Attention that gathers blocks and is not compiled: the reference, and attention over latents.

May import: attention.interface, attention.lists, device, kernels_triton_free, kernels_triton_free.strips,
specs.
Doors: `SdpaAttention` in sdpa.py, `GatheredLatents` in latents.py.
"""
