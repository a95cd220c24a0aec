"""Functions of tensors only: the kernels of the engine as plain PyTorch, made fast by torch.compile. Usable without minivllm."""
