"""A conversation and its slash commands, whoever answers.

May import: bench.parts, cli.engine, cli.terminal, cli.trace, frontend, profiling, server.parsers.
Door: `ChatSession` in chat_session.py.
"""
