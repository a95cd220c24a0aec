"""KV transfer: the connector as the scheduler sees it, and the blocks that wait for a load.

May import: config, hub, kv_cache, kv_cache.blocks, plugins.
Door: `KVConnectorScheduler` in connector.py, `RemoteLoads` in remote_loads.py.
"""
