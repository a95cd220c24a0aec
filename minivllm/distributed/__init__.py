"""How the workers of one model exchange and add up tensors.

May import: torch only.
Door: `Communicator` in communicator.py.
"""
