"""What crosses between an executor and its worker processes:
the ring of records, answers, log lines, last words.

May import: config, distributed, kv_transfer.
Door: `RingWriter` in broadcast_ring.py, `Channel` in records.py.
"""
