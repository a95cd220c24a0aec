"""Regions compiled ahead of time, packaged on disk and found there by their keys.

May import: compilation, hub.
Door: `PackagedRegionCompiler` in region_packages.py.
"""
