"""Where models come from: local paths, short names, ids of a hub; downloads, checked and locked.

May import: the vocabulary only.
Door: `resolve_model` in fetch.py.
"""
