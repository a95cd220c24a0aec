"""A conversation and its slash commands, whoever answers.

May import: cli.engine, cli.terminal, frontend, profiling, server.parsers, simulation.
Door: `ChatSession` in chat_session.py.
"""
