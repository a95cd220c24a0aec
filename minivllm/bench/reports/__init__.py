"""Reports of measurements: statistics, tables, files, and the comparison of two.

May import: bench.sides, cli.machine, cli.terminal.
Door: `Report` in report.py.
"""
