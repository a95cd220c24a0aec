"""From the size of an image to the tokens that stand for it, for each family.

May import: the vocabulary only.
Door: `make_expansion` in families.py.
"""
