"""``minivllm bench``: the group of benchmark commands."""

from __future__ import annotations

import typer

from minivllm.cli.bench.model import model
from minivllm.cli.bench.overhead import overhead

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed: medians of repetitions, engines in turn, same token ids.",
)
bench.command("model")(model)
bench.command("overhead")(overhead)
