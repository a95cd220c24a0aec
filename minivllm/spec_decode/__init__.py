"""Speculative decoding: drafters with and without a model, and how many drafts pay.

May import: attention, batch, compilation, config, device, graphs, models, plugins, sampling.
Door: `Speculation` in speculation.py.
"""
