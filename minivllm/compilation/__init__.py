"""Regions of a model become compiled code: by torch.compile in the process, or packaged on disk.

May import: hub, kernels_triton_free, kernels_triton_free.inductor, kernels_triton_free.packed,
kernels_triton_free.loops.
Door: `RegionCompiler` in compiler.py.
"""
