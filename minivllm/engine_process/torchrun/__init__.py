"""An engine in processes that torchrun started, all of which run the same script: rank 0 decides for all.

Annex: plugs in at CLIENTS.
May import: config, distributed, engine, executor, executor.records, kv_cache, kv_transfer, model_facts,
models.registry, worker.
Door: `TorchrunClient` in client.py.
"""
