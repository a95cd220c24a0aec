"""How the workers of one model exchange and add up tensors.

May import: profiling.
Door: `Communicator` in communicator.py, `Mesh` in mesh.py, `Lockstep` in lockstep.py.
"""
