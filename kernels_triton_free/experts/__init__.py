"""Mixtures of experts: routing of tokens, and products of many small MLPs.

May import: torch only.
"""
