"""Limits of clients: sizes, counts, connections, places in the queue.

May import: device, server.wire.
Door: `Admission` in admission.py.
"""
