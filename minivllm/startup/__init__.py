"""What a process settles before it imports torch and loads a model: how threads of OpenMP wait, and when
garbage is collected.

May import: the vocabulary only.
Doors: `choose_wait_policy` in openmp.py, `without_collections` in garbage.py.
"""
