"""From the size of an image to the tokens that stand for it, for each family.

May import: nothing of minivllm.
Door: `make_expansion` in families.py.
"""
