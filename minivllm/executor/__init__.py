"""Where workers live and how they are called.

May import: config, kv_cache, models, worker.
Door: `Executor` in protocol.py.
"""
