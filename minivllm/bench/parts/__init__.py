"""One engine taken apart: parts of a step and of a start, and what the hardware bounds.

May import: batch, bench.reports, cli.engine, config, device, engine, frontend, linear, models,
models.decoder, profiling.
"""
