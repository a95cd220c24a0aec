"""The engine core, schedule, execute, update; how it is configured, and what operators ask of it.

May import: attention, checkpoints, config, device, distributed, executor, executor.wire, gguf, hub, kv_cache,
kv_cache.blocks, kv_transfer, lora, model_facts, models, models.eagle, models.registry, profiling, sampling, scheduler,
structured_output.
Door: `EngineCore` in core.py.
"""
