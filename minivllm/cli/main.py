"""``minivllm``: the command line. Nothing here imports torch; a command does when it starts an engine."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from minivllm import __version__
from minivllm.cli.bench.command import bench
from minivllm.cli.chat import chat
from minivllm.cli.env import env
from minivllm.cli.generate import generate
from minivllm.cli.pull import pull
from minivllm.cli.serve import serve
from minivllm.cli.terminal_text import printable
from minivllm.cli.trace import trace
from minivllm.errors import MinivllmError

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
    """A serving engine for language models that can be read in an afternoon.

    Example: minivllm chat
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # A model's text may hold what the terminal's encoding lacks; a replacement beats a crash.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except MinivllmError as error:
        print(f"minivllm: {printable(str(error))}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader left (for example `| head`): nothing more to say, and nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    try:
        app(args=arguments, prog_name="minivllm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


if __name__ == "__main__":
    main()
