"""Named spans of the engine's code, heard by whoever asks, and written for a viewer of traces.

May import: the vocabulary only.
Door: `span` and `listen` in spans.py, `TraceRecorder` in trace_recorder.py.
"""
