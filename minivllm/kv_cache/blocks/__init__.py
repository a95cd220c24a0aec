"""What a pool of blocks is made of: blocks, the queue of free ones, and an index of the tokens in them.

May import: the vocabulary only.
Door: `Continuations` in continuations.py.
"""
