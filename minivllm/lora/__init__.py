"""Low-rank adapters: read from PEFT checkpoints, kept in host memory and device slots, chosen per request.

May import: checkpoints, compilation, config, kernels_triton_free, linear, models, specs, stop_conditions.
Door: `AdapterManager` in manager.py.
"""
