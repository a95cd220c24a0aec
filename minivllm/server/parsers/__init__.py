"""Reading what a model writes: its reasoning, its tool calls, its text. Incremental, one pass, no backtracking."""
