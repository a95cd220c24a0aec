"""The engine of a command: its flags, its start, its settings on this machine, its answers.

May import: checkpoints, cli.terminal, compilation, config, device, engine, frontend, hub, processing,
program, simulation, worker.loading.
Door: `EngineHost` in engine_start.py.
"""
