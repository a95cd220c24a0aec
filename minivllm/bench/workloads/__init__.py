"""What is asked of an engine under measurement: cases, lengths, arrivals, served requests.

May import: bench.reports, bench.sides, cli.engine, cli.terminal.
"""
