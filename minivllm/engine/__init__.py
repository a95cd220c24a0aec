"""The engine core: schedule, execute, update; its configuration, and calls by operators.

May import: attention, checkpoints, config, device, distributed, executor, families.makers, gguf, graphs, hub,
kv_cache, kv_cache.blocks, kv_cache.tree, kv_transfer, lora, models, models.decoder, multimodal, profiling,
sampling, scheduler, spec_decode.eagle, specs, stop_conditions, structured_output.
Door: `EngineCore` in core.py.
"""
