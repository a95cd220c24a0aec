"""What all endpoints share: the engine, the models that are served, settings, running prepared requests.

May import: frontend, metrics, processing, server.bodies, server.limits, server.parsers, tokenizer.
Door: `Service` in service.py.
"""
