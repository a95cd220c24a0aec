"""The OpenAI-compatible HTTP server: the application, its start and its end.

May import: frontend, metrics, server.answers, server.bodies, server.endpoints, server.limits, server.page,
server.protocol, server.service.
Door: `build_app` in app.py.
"""
