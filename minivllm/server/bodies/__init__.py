"""What all bodies share: errors as clients expect them, sampling fields, fields without effect.

May import: the vocabulary only.
Door: `ApiError` in errors.py.
"""
