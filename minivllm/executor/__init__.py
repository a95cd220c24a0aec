"""Where workers live and how they are called.

May import: config, kv_cache, model_facts, worker.
Door: `Executor` in protocol.py.
"""
