"""A conversation and its slash commands, with an engine here or with a server.

May import: cli.engine, cli.terminal, frontend, multimodal, processing, profiling, server.parsers, simulation.
Door: `ChatSession` in chat_session.py.
"""
