"""Steps replayed as CUDA graphs: capture with breaks, and buckets of step sizes.

May import: batch, config, device, models, specs.
Door: `StepGraphs` in step_graphs.py.
"""
