"""Models by name: local paths, short names and hub ids; downloads with checksums and locks.

May import: the vocabulary only.
Door: `resolve_model` in fetch.py.
"""
