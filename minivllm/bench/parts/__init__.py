"""One engine taken apart: parts of a step and of a start, and what the hardware bounds.

May import: bench.reports, cli.engine, config, device, engine, frontend, profiling, simulation.
"""
