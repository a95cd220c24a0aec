"""Where workers live and how they are called.

May import: config, models, worker.
Door: `Executor` in protocol.py.
"""
