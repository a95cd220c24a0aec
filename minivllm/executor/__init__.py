"""Where workers live and how they are called: in this process, or in others.

May import: compilation, config, device, distributed, executor.records, kv_cache, kv_transfer, model_facts,
models.registry, profiling, worker.
Door: `Executor` in protocol.py.
"""
