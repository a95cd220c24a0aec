"""Limits of clients: sizes, counts, connections, places in the queue.

May import: device, server.bodies.
Door: `Admission` in admission.py.
"""
