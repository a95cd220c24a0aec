"""Which blocks of the KV cache belong to whom: block pool, LRU free queue, block hashes, prefix cache.

May import: kv_cache.blocks.
Door: `KVCacheManager` in manager.py.
"""
