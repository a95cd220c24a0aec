"""An engine without a model: what a step must at least take, and what stands in for workers.

May import: batch, kernels_triton_free.packed, models, models.decoder.
Door: `measure_machine` in bounds.py.
"""
