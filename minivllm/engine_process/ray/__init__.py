"""An engine on the nodes of a Ray cluster: Ray places and starts, all else goes over connections of our own.

Annex: plugs in at EXECUTORS.
May import: config, engine, executor, executor.nodes, executor.records, specs, startup.
Door: `RayExecutor` in executor.py.
"""
