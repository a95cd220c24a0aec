"""``minivllm bench``: measured speed, always against something and always in turn.

May import: bench.accuracy, bench.parts, bench.reports, bench.rounds, bench.sides, cli.engine, config, server.proxy,
tokenizer.
"""
