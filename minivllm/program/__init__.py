"""A model as a program: pieces of arithmetic and seams, fused into regions, and the loop that runs them.

May import: compilation, distributed, profiling.
Door: `fuse` in fuse.py, `Runner` in runner.py.
"""
