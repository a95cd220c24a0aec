"""The service that all endpoints use: the engine, the served models, settings, prepared requests.

May import: frontend, metrics, processing, server.bodies, server.limits, server.parsers, tokenizer.
Door: `Service` in service.py.
"""
