"""What every model computes, in plain PyTorch: read this first; tests judge by it.

May import: kernels_triton_free.experts, models, specs.
Door: `reference_forward` in reference.py.
"""

from minivllm.models.reference.reference import reference_forward

__all__ = ["reference_forward"]
