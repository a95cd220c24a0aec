"""What engines are asked under measurement: token ids by length and rate, and prompts in words.

May import: bench.reports, bench.sides, cli.terminal, tokenizer.
"""
