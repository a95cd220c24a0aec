"""The prefix cache as a radix tree, for people to look at.

May import: kv_cache, kv_cache.blocks.
Door: `prefix_tree` in prefix_tree.py.
"""
