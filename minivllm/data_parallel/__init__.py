"""Several engines behind one frontend: who gets a request, what all are asked, what a death costs.

May import: config, device, distributed, engine_process, kv_cache.blocks.
Door: `make_client` in client.py.
"""
