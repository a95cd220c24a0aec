"""A transformers model traced once and cut at attention into regions, as minivllm's own decoder is.

May import: compilation, distributed, kernels_triton_free, linear, linear.methods, models, profiling.
Door: `TracedModel` in traced.py.
"""
