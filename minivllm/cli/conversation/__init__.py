"""A conversation and its slash commands, with an engine here or with a server.

May import: cli.engine, cli.terminal, frontend, multimodal.files, processing, profiling, server.parsers,
simulation.
Door: `ChatSession` in chat_session.py.
"""
