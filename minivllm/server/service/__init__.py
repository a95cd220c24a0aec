"""What all endpoints share: the engine, the models that are served, settings, running prepared requests.

May import: config, metrics, processing, server.limits, server.parsers, server.wire, tokenizer.
Door: `Service` in service.py.
"""
