"""The connectors, and what their workers' sides have in common:
whole blocks in and out of a device's KV cache.

May import: config, device, kv_cache, kv_cache.blocks, kv_transfer, profiling, specs.
Door: `KVConnectorWorker` in worker_side.py, `OffloadingConnector` in offloading.py, `SharedStorageConnector`
in shared_storage.py, `MultiConnector` in multi.py.
"""
