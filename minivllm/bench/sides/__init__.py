"""One engine under measurement: the step-wise interface, and how each engine is driven by it.

May import: config, engine, frontend.
Door: `StepEngine` in drive.py.
"""
