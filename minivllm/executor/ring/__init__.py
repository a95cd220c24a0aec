"""What the engine core shares with its worker processes: records for all of them, and what each has sampled.

May import: the vocabulary only.
Door: `RingWriter` in broadcast_ring.py.
"""
