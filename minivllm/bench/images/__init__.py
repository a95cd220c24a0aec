"""Requests with images: a second question about an image, and text that decodes beside new images.

May import: bench.parts, bench.reports, bench.rounds, bench.sides, cli.engine, config, engine,
engine_process.protocol, frontend, multimodal, processing.
"""
