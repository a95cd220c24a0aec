"""Reading what a model writes: its reasoning, its tool calls, its text.
Incremental, one pass, no backtracking.

May import: the vocabulary only.
"""
