"""``minivllm bench``: speed and accuracy, measured against a reference.

Annex: plugs in at COMMANDS.
May import: bench.accuracy, bench.images, bench.parts, bench.programs, bench.reports, bench.requests,
bench.rounds, bench.shapes, bench.sides, cli.engine, config, server.proxy.
"""
