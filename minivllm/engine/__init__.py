"""The engine core: schedule, execute, update; its configuration, and calls by operators.

May import: attention, checkpoints, config, device, distributed, executor, gguf, hub, kv_cache, kv_cache.blocks,
kv_transfer, lora, model_facts, models, models.eagle, models.registry, multimodal, profiling, sampling, scheduler,
structured_output.
Door: `EngineCore` in core.py.
"""
