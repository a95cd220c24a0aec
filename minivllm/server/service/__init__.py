"""What all endpoints share: the engine, the models that are served, settings, running prepared requests.

May import: frontend, metrics, processing, server.limits, server.parsers, server.wire, tokenizer.
Door: `Service` in service.py.
"""
