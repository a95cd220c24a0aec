"""An engine without a model: what a step must at least take, and the scheduler over made-up requests.

May import: batch, config, kernels_triton_free.packed, kv_cache, kv_transfer, models, models.decoder, scheduler.
Door: `scheduled_steps` in steps.py, `measure_machine` in bounds.py.
"""
