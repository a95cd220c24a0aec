"""The persistent batch: batch slots, tables on the device, the inputs of a step, and a model over its blocks.

May import: attention, batch.states, compilation, device, kernels_triton_free, kernels_triton_free.strips,
kv_cache, lora, models, models.mixers, profiling, specs.
Door: `PersistentBatch` in persistent_batch.py, `PagedModel` in paged_model.py.
"""
