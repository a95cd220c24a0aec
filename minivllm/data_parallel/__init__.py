"""Several engines as one: routing of requests, calls to all engines, restarts after a failure.

May import: config, device, distributed, engine_process, engine_process.protocol, kv_cache.blocks, plugins.
Door: `make_client` in client.py.
"""
