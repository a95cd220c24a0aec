"""A GPU that computes on the CPU: tensors of device "cuda", streams, events, pinned memory and CUDA graphs.
The host's half of the GPU path runs on it, with real numbers. See README.md."""
