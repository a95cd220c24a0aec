"""Engines that are not quite real:
a scheduler without workers, ranks as threads, and what a step must at least take.

May import: batch, checkpoints, compilation, config, distributed, engine, engine_process, executor, frontend,
kv_cache, kv_transfer, linear, models, models.decoder, program, scheduler, specs, worker.
Door: `scheduled_steps` in steps.py, `VirtualShards` in ranks.py, `SimulatedExecutor` in executor.py,
`measure_machine` in bounds.py.
"""
