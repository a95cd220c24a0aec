"""How Inductor is changed to generate good code for this package on a CPU, and to compile it in less time.

Without these changes regions compile as PyTorch alone compiles them.

Annex: plugs in at CODE_GENERATORS.
May import: kernels_triton_free, kernels_triton_free.compiler, kernels_triton_free.cpu_code.loops,
kernels_triton_free.packed.
Door: `install` in install.py.
"""
