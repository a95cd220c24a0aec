"""A conversation and its slash commands, with an engine here or with a server.

May import: bench.parts, cli.engine, cli.terminal, cli.trace, frontend, profiling, server.parsers.
Door: `ChatSession` in chat_session.py.
"""
