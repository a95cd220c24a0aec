"""Which part of a transformers model is whose, where several workers divide it.

May import: distributed, models, models.transformers_regions.
Door: `Division` in division.py.
"""
