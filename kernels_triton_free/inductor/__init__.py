"""How Inductor is changed to generate good code for this package on a CPU, and to take less time for it.

May import: kernels_triton_free, kernels_triton_free.compiler.
Door: `patch_inductor` in patches.py.
"""
