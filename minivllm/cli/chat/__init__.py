"""The chat in a terminal, with an engine of its own or with a server.

May import: cli.conversation, cli.engine, cli.machine, cli.terminal, cli.trace, config, frontend, processing,
server.parsers.
Door: `chat` in command.py.
"""
