"""How well an engine predicts a text, beside how fast it is: fewer bits must not cost more than they bring.

May import: bench.reports, bench.rounds, bench.sides, cli.engine, cli.terminal, tokenizer.
"""
