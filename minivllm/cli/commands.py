"""The command line's table of commands. Nothing here imports torch; a command does when it starts an engine."""

from __future__ import annotations

from typing import Annotated

import typer

from minivllm import __version__
from minivllm.cli.bench.command import bench
from minivllm.cli.chat import chat
from minivllm.cli.env import env
from minivllm.cli.generate import generate
from minivllm.cli.pull import pull
from minivllm.cli.serve import serve
from minivllm.cli.trace import trace

app = typer.Typer(
    name="minivllm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes cut long flag names such as --max-num-batched-tokens off on a terminal of 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("pull")(pull)
app.command("env")(env)
app.command("trace")(trace)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"minivllm {__version__}")
        raise typer.Exit


@app.callback()
def minivllm(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A serving engine for language models, whose core can be read in an afternoon.

    Example: minivllm chat
    """
