"""The end of a sequence: by token ids and repetition, by stop strings and stop expressions, matched as tokens
arrive; expressions that name layers.

May import: the vocabulary only.
"""
