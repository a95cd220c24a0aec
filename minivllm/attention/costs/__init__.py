"""What attention costs on the machine at hand: a model of it, and the measurements that it is made from.

May import: attention.interface, compilation, device, specs.
Doors: `Choice` in choice.py, `Work` in model.py.
"""
