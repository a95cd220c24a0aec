"""Named ranges of a step, recorded for a viewer of traces.

May import: the vocabulary only.
Door: `TraceRecorder` in trace_recorder.py.
"""
