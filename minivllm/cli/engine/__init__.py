"""The engine of a command: its flags, its start, its answers, and other servers' answers.

May import: cli.terminal, config, frontend, hub, processing.
Door: `EngineHost` in engine_start.py.
"""
