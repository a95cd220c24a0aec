"""The connection from a frontend to an engine core, in the same process or through sockets.

May import: config, device, distributed, engine, engine_process.protocol, executor, executor.records,
multimodal, plugins, specs, startup.
Door: `make_client` in client.py.
"""
