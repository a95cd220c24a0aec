"""The command line's table of commands.
Nothing here imports torch; a command does when it starts an engine."""

from __future__ import annotations

import functools
import shlex
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from minivllm import __version__
from minivllm.cli.chat.command import chat
from minivllm.cli.engine.grouped_command import GroupedCommand
from minivllm.cli.generate import generate
from minivllm.cli.machine.env import env
from minivllm.cli.proxy import proxy
from minivllm.cli.pull import list_models, pull
from minivllm.cli.serve import serve
from minivllm.cli.trace.command import trace
from minivllm.errors import ConfigError
from minivllm.hub.fetch import WHEEL_MODELS
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import COMMANDS


class _BenchCommands(typer.core.TyperGroup):
    """Imported when one of them is asked for: they import more than all other commands together."""

    @property  # type: ignore[override]
    def commands(self) -> dict[str, Any]:
        return self._load()

    @commands.setter
    def commands(self, none_yet: dict[str, Any]) -> None:
        """The constructor sets an empty table, which is ignored."""

    @staticmethod
    @functools.cache
    def _load() -> dict[str, Any]:
        group: Any = typer.main.get_command(import_object("bench", COMMANDS["bench"]))
        return group.commands


ALIASES = {"run": "chat", "ls": "list", "download": "pull", "complete": "generate", "benchmark": "bench"}
"""Commands as other programs call them -> ours."""
NOT_HERE = {
    "ps": "models run only as long as the command that started them. `minivllm list` shows what is on disk.",
    "show": "`minivllm env NAME` shows a model, `minivllm list` all that is on disk.",
    "rm": "`minivllm list` shows where each model lies; delete that file or directory.",
    "stop": "models run only as long as the command that started them: end that one.",
    "create": "a model is a directory or a .gguf file: name it in place of MODEL.",
}
"""Commands of other programs -> what there is in their place."""


def _stop_with(text: str) -> NoReturn:
    print(text)
    raise typer.Exit


class _Commands(typer.core.TyperGroup):
    """With ``simulate``, which is imported when it is asked for as well, and not to be listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "simulate"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "simulate":
            return typer.core.TyperCommand(
                "simulate", help="Simulate engines that share requests, without a model."
            )
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "help":
            # `help COMMAND` is `COMMAND --help`; alone it is the help of all.
            return (
                super().resolve_command(ctx, [*args[1:], "--help"])
                if args[1:]
                else _stop_with(ctx.get_help())
            )
        if args[0] in ALIASES:
            args = [ALIASES[args[0]], *args[1:]]
        elif args[0] in NOT_HERE:
            raise ConfigError(f"There is no command {args[0]!r}: {NOT_HERE[args[0]]}")
        elif " " in args[0] or args[0].lower() in WHEEL_MODELS:
            raise ConfigError(
                f"{args[0]!r} is no command. To talk with a model: minivllm chat {shlex.join(args)}"
            )
        name, command, rest = super().resolve_command(ctx, args)
        return name, self._load_simulate() if name == "simulate" else command, rest

    @staticmethod
    @functools.cache
    def _load_simulate() -> Any:
        alone = typer.Typer(rich_markup_mode=None)
        alone.command("simulate")(import_object("simulate", COMMANDS["simulate"]))
        return typer.main.get_command(alone)


app = typer.Typer(
    name="minivllm",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes cut long flag names such as --max-num-batched-tokens off on a terminal of 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat", cls=GroupedCommand)(chat)
app.command("generate", cls=GroupedCommand)(generate)
app.command("serve", cls=GroupedCommand)(serve)
app.command("proxy")(proxy)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("env")(env)
app.command("trace")(trace)
app.add_typer(
    typer.Typer(
        cls=_BenchCommands,
        no_args_is_help=True,
        rich_markup_mode=None,
        help=(
            "Measure speed and accuracy: medians of repetitions, engines in turn, same token ids.\n\n"
            "Example: minivllm bench model --vs transformers"
        ),
    ),
    name="bench",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"minivllm {__version__}")
        raise typer.Exit


@app.callback()
def minivllm(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-v",
            "-V",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """A serving engine for language models, whose core can be read in an afternoon.

    Example: minivllm chat
    """
