"""The engine behind a command: its flags, its start, what it would use here, what it answers.

May import: cli.terminal, compilation, config, device, engine, frontend, hub, model_facts, processing,
program, worker.
Door: `EngineHost` in engine_start.py.
"""
