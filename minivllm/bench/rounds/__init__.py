"""Engines that are measured in turn, each in a process of its own, and the requests they get.

May import: bench.reports, bench.sides, cli.terminal, config, engine, gguf, hub, tokenizer.
Door: `measure_in_turn` in rounds.py.
"""
