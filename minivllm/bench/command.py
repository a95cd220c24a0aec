"""``minivllm bench``: the group of benchmark commands."""

from __future__ import annotations

import typer

from minivllm.bench.accuracy.accuracy import accuracy
from minivllm.bench.disaggregated import disaggregated
from minivllm.bench.engines import model, throughput
from minivllm.bench.images.command import images
from minivllm.bench.parts.attention import attention
from minivllm.bench.parts.overhead import overhead
from minivllm.bench.parts.parts import roofline
from minivllm.bench.parts.startup import startup
from minivllm.bench.programs.command import programs
from minivllm.bench.reports.report import compare
from minivllm.bench.serve import serve
from minivllm.bench.shapes.command import gpu
from minivllm.cli.engine.grouped_command import GroupedCommand

bench = typer.Typer(rich_markup_mode=None)
for command in (
    model,
    throughput,
    serve,
    accuracy,
    disaggregated,
    programs,
    images,
    startup,
    overhead,
    roofline,
    attention,
    gpu,
    compare,
):
    bench.command(command.__name__, cls=GroupedCommand if hasattr(command, "groups_of_flags") else None)(
        command
    )
