"""Which request has which blocks of the KV cache, group by group, and what the prefix cache gives again.

May import: kv_cache.blocks.
Door: `KVCacheManager` in manager.py.
"""
