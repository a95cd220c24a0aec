"""The decoder as one of several workers computes it.

May import: compilation, distributed, kernels_triton_free, linear.methods, models, models.decoder, models.mixers,
profiling.
Door: `ShardedDecoder` in decoder.py, `SharedExpertsDecoder` in shared_experts.py.
"""
