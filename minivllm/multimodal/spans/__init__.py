"""From the size of an image to the tokens that stand for it, for each family.

Door: `make_expansion` in families.py.
"""
