"""How a frontend reaches an engine core: in its own process, or in another one over sockets.

May import: config, device, distributed, engine, executor, executor.records, kv_cache, model_facts.
Door: `make_client` in client.py.
"""
