"""Attention by products over copies of the blocks that are read.

May import: attention, compilation, device, kernels_triton_free, kernels_triton_free.chunks, models.
Doors: `ChunkProducts` in chunks.py, `GatheredLatents` in latents.py.
"""
