"""``python -m minivllm``: the command line."""

from minivllm.cli.main import command

command()
