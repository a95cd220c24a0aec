"""One engine taken apart: parts of a step, attention kernels, what the hardware bounds.

May import: attention, batch, bench.reports, cli.options, config, engine, frontend, kernels_triton_free, models,
profiling.
"""
