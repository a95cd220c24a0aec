"""A pool of blocks and what it is made of: blocks, the queue of free ones, an index of the tokens in them.

May import: the vocabulary only.
Door: `BlockPool` in block_pool.py, `Continuations` in continuations.py.
"""
