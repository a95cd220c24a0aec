"""What frontends and engines are to each other: clients as protocols, messages in frames, and answers to an
engine's questions.

May import: config, distributed, executor.records, kv_cache, multimodal.
Doors: `EngineClient` and `AsyncEngineClient` in clients.py, the messages in frames.py, `PixelAnswers` in
pixels.py.
"""
