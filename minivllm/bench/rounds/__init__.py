"""Engines that are measured in turn, each in a process of its own.

May import: bench.reports, bench.requests, bench.sides, config, engine, gguf, hub.
Door: `measure_in_turn` in rounds.py.
"""
