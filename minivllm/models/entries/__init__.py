"""Entries of a configuration, checked one by one, and what several families read in the same way.

May import: models.
Door: `Entries` in entries.py.
"""
