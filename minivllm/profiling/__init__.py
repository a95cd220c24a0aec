"""Named spans of the engine's code, for listeners and for a trace viewer.

May import: the vocabulary only.
Door: `span` and `listen` in spans.py, `TraceRecorder` in trace_recorder.py.
"""
