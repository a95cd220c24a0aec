"""How much memory the pool of each KV group gets.

May import: kv_cache.
Door: `fit_pools` in sizing.py.
"""
