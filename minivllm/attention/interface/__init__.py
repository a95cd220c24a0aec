"""The extension point of attention, and the rule that an attention variant is written as.

May import: compilation, device, kernels_triton_free.strips, specs.
Doors: `AttentionBackend` in backend.py, `AttentionRule` in rule.py.
"""
