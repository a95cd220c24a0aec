"""Layers that keep a state: where the states of requests lie, and how a step moves them on.

May import: attention, device, kernels_triton_free.state, kv_cache, models.mixers.
Door: `StateTables` and `StateRowBuilder` in state_tables.py, `ReplayBuilder` in replay.py.
"""
