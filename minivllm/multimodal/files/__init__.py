"""Files of images: checked, measured, decoded and hashed, as many at once as their bounds allow.

May import: the vocabulary only.
Door: `Pictures` in decoding.py, `measure` in measuring.py.
"""
