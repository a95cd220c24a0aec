"""When a text ends: stop strings and stop expressions, matched as tokens arrive; and expressions that name layers.

May import: the vocabulary only.
"""
