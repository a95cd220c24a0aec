"""Descriptions of a model as data: layers, attention, rotary tables, and what layers keep.

May import: compilation, kernels_triton_free.experts, kernels_triton_free.packed, kernels_triton_free.state,
kernels_triton_free.strips, weights.
Door: `DecoderConfig` in decoder.py, `LayerSpec` in layers.py.
"""
