"""Communication between the workers of one model: tensors are exchanged and added up.

May import: device, profiling.
Door: `Communicator` in communicator.py, `Mesh` in mesh.py, `Lockstep` in lockstep.py.
"""
