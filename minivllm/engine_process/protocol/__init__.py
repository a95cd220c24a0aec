"""What frontends and engines are to each other: clients as protocols, and answers to an engine's questions.

May import: config, multimodal.
Door: `EngineClient` and `AsyncEngineClient` in clients.py, `PixelAnswers` in pixels.py.
"""
