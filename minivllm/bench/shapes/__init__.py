"""Shapes of well-known models with random weights, and the cases in which engines are compared on a GPU.

May import: bench.reports, bench.requests, bench.rounds, cli.engine.
Door: `gpu` in command.py, `Shape` in table.py.
"""
