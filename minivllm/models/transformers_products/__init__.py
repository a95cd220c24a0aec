"""The linear layers and experts of a transformers model, computed by the engine's methods.

May import: linear, linear.experts, linear.methods, models.transformers_plan, models.transformers_regions.
Door: `replace_linears` in linears.py, `replace_experts` in experts.py.
"""
