"""The command line: the table of commands, and the short ones.

May import: bench, cli.chat, cli.engine, cli.options, cli.terminal, cli.trace, frontend, hub, metrics, server,
server.service.
Door: `main` in main.py.
"""
