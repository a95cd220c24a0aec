"""What a layer computes for every token by itself: the gated MLP, and experts.

May import: compilation, kernels_triton_free, kernels_triton_free.experts, linear, linear.experts,
linear.methods, models, models.mixers, program, specs, weights.
Door: `FeedForward` in gated_mlp.py, `make_feed_forward` in factory.py.
"""
