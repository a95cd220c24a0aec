"""A transformers model traced once and cut at attention into regions, as minivllm's own decoder is.

May import: compilation, distributed, kernels_triton_free, linear, linear.experts, linear.methods,
models, program.
Door: `TracedModel` in traced.py.
"""
