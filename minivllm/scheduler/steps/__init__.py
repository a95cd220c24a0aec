"""Steps on their way: what one plans, and what those in flight leave to the next.

May import: the vocabulary only.
Door: `StepPlan` in step_plan.py.
"""
