"""Speculative decoding: guess several tokens, verify them in one step, keep what the model itself would have said."""
