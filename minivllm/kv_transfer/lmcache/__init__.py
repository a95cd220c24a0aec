"""Blocks in LMCache's server, which keeps them for any number of engines.

May import: config, kv_cache.blocks, kv_transfer, kv_transfer.connectors, kv_transfer.lookup.
Door: `LMCacheConnector` in lmcache_connector.py.
"""
