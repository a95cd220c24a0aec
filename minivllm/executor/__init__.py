"""Executors: they start the workers, in this process or in others, and call them.

May import: compilation, config, device, distributed, executor.records, kv_cache, kv_transfer, model_facts,
models.registry, profiling, worker.
Door: `Executor` in protocol.py.
"""
