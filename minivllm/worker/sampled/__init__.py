"""What steps have sampled, on its way to the host and to the other stages of a pipeline.

May import: batch, distributed, sampling.
Doors: `PendingStep` in pending_step.py, `TokenFeedback` in token_feedback.py.
"""
