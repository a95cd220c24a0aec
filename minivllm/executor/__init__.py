"""Executors: they start the workers, in this process or in others, and call them.

May import: checkpoints, compilation.packaged, config, device, distributed, executor.records, families.makers,
kv_cache, kv_transfer, profiling, specs, worker.
Door: `Executor` in protocol.py.
"""
