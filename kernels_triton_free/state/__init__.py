"""Layers that keep a state of fixed size in place of keys and values:
short convolutions, gated delta rule, Mamba2.

May import: torch only.
"""
