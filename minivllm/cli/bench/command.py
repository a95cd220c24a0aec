"""``minivllm bench``: the group of benchmark commands."""

from __future__ import annotations

import typer

from minivllm.cli.bench.attention import attention
from minivllm.cli.bench.compare import compare
from minivllm.cli.bench.model import model
from minivllm.cli.bench.overhead import overhead
from minivllm.cli.bench.roofline import roofline
from minivllm.cli.bench.serve import serve
from minivllm.cli.bench.speculation import speculation
from minivllm.cli.bench.startup import startup
from minivllm.cli.bench.workload_commands import latency, sweep, throughput

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "Measure speed: medians of repetitions, engines in turn, same token ids.\n\n"
        "Example: minivllm bench model --vs transformers"
    ),
)
for command in (
    model,
    latency,
    throughput,
    sweep,
    speculation,
    serve,
    startup,
    roofline,
    attention,
    overhead,
    compare,
):
    bench.command(command.__name__)(command)
