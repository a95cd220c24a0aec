"""Keys and values that travel: what a connector is to the scheduler, and the blocks that wait for a load.

May import: config, hub, kv_cache, kv_cache.blocks.
Door: `KVConnectorScheduler` in connector.py, `RemoteLoads` in remote_loads.py.
"""
