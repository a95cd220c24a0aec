"""Regions of a model become compiled code: by torch.compile in the process, or packaged on disk.

May import: hub, kernels_triton_free, plugins.
Door: `RegionCompiler` in compiler.py.
"""
