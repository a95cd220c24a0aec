"""The end of a text: stop strings and stop expressions, matched as tokens arrive;
expressions that name layers.

May import: the vocabulary only.
"""
