"""The decoder: weights and regions of every model whose layers are described by specs.

May import: compilation, distributed, kernels_triton_free, kernels_triton_free.compiler,
kernels_triton_free.packed, linear, linear.experts, linear.methods, models, models.feed_forward,
models.mixers, profiling, program, specs, weights.
Door: `Decoder` in decoder.py.
"""

from minivllm.models.decoder.decoder import Decoder

__all__ = ["Decoder"]
