"""Flags that commands share: one for every engine argument and sampling parameter.

May import: config, frontend.
Door: `EngineOptions` in engine_options.py.
"""
