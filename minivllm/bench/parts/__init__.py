"""One engine taken apart: parts of a step and of a start, and what the hardware bounds.

May import: attention, attention.costs, attention.interface, attention.lists, bench.reports, cli.engine,
compilation, compilation.packaged, config, device, engine, frontend, kernels_triton_free.strips, profiling,
simulation, specs.
"""
