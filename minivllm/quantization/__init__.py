"""Quantised linear layers: which weights are stored in fewer bits, and what multiplies them."""
