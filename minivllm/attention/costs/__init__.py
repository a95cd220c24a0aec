"""What attention costs on the machine at hand: a model of it, and the measurements that it is made from.

May import: attention.interface, attention.lists, compilation, device, specs.
Doors: `Choice` in choice.py, `Sharing` in sharing.py, `Work` in model.py.
"""
