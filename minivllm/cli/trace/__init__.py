"""The scheduler's decisions without a model: JSON lines, a picture, a Perfetto file.

May import: cli.engine, cli.terminal, config, kv_cache, kv_cache.tree, plugins, scheduler, simulation.
Door: `simulate` in command.py.
"""
