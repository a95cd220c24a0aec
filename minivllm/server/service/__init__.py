"""The service that all endpoints use: the engine, the served models, settings, prepared requests.

May import: frontend, metrics, processing, server.limits, server.parsers, server.wire, tokenizer.
Door: `Service` in service.py.
"""
