"""When a text ends: stop strings and stop expressions, matched as tokens arrive.

May import: the vocabulary only.
"""
