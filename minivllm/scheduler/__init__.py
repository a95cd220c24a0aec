"""How many tokens each request computes in a step:
budget, chunks, policies, preemption, the end of a request.

May import: config, kv_cache, kv_transfer, multimodal, plugins, scheduler.steps, stop_conditions.
Door: `Scheduler` in scheduler.py.
"""
