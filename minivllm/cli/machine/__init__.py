"""What `minivllm env` tells: the machine, its defaults, and a model's implementation, cache and program.

May import: checkpoints, cli.engine, cli.terminal, compilation, config, device, engine, hub, program,
simulation, startup, worker.loading.
"""
