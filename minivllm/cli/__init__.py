"""The command line: the table of commands, and the short commands.

May import: cli.chat, cli.engine, cli.machine, cli.terminal, cli.trace, config, engine_process, frontend, hub,
metrics, plugins, server, server.proxy, server.service.
Door: `main` in main.py.
"""
