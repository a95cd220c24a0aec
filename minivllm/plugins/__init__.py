"""Extension points: settings that take a name for an implementation, and import paths of all of these.

May import: the vocabulary only.
Door: `Plugins` in plugin.py, the extension points in points.py.
"""
