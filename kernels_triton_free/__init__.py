"""Functions of tensors only: the engine's kernels as plain PyTorch, made fast by torch.compile.

Usable without minivllm.

May import: kernels_triton_free.compiler, kernels_triton_free.strips.
"""
