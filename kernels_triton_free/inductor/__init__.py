"""How Inductor is changed to generate good code for this package on a CPU.

May import: kernels_triton_free, kernels_triton_free.compiler.
Door: `patch_inductor` in patches.py.
"""
