"""Blocks that travel by other projects' means: through LMCache's server, or read out of memory by NIXL.

Annex: plugs in at CONNECTORS.
May import: config, distributed, kv_cache.blocks, kv_transfer, kv_transfer.connectors, kv_transfer.lookup,
specs.
Door: `LMCacheConnector` in lmcache_connector.py, `NixlConnector` in nixl_connector.py.
"""
