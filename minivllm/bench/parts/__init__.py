"""One engine taken apart: parts of a step and of a start, attention kernels, what the hardware bounds.

May import: attention, batch, bench.reports, cli.engine, config, engine, frontend, kernels_triton_free, models, worker.
"""
