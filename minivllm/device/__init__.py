"""Properties of a device: policy, staging buffers, memory, cores.

May import: kernels_triton_free, kernels_triton_free.packed.
Door: `DevicePolicy` in policy.py.
"""
