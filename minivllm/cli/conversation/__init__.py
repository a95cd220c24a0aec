"""A conversation and its slash commands, whoever answers.

May import: cli.engine, cli.terminal, cli.trace, frontend, profiling, server.parsers, simulation.
Door: `ChatSession` in chat_session.py.
"""
