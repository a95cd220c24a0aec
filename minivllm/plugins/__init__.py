"""Seams: the settings that take a name for an implementation, and the import paths of all implementations.

May import: the vocabulary only.
Door: `Plugins` in plugin.py, the seams in seams.py.
"""
