"""Which blocks of the KV cache belong to whom: block pool, LRU free queue, block hashes, prefix cache.

May import: the vocabulary only.
Door: `KVCacheManager` in manager.py.
"""
