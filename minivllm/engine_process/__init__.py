"""The connection from a frontend to an engine core, in the same process or through sockets.

May import: config, device, distributed, engine, engine_process.ray, engine_process.torchrun, executor, executor.nodes,
executor.wire, model_facts.
Door: `make_client` in client.py.
"""
