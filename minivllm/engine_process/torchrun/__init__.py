"""An engine in processes that torchrun started, all of which run the same script: rank 0 decides for all.

Annex: plugs in at CLIENTS.
May import: config, distributed, engine, executor, executor.records, families.makers, kv_cache, kv_transfer,
specs, worker.
Door: `TorchrunClient` in client.py.
"""
