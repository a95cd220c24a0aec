"""Many engines without a model:
real schedulers, prefix caches and routing, in the time that a step would take.

May import: bench, bench.reports, bench.requests, bench.rounds, bench.sides, cli.engine, config,
data_parallel, kv_cache, plugins, scheduler, simulation.
Door: `simulate` in command.py.
"""
