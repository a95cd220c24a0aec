"""``minivllm bench``: the group of benchmark commands."""

from __future__ import annotations

import typer

from minivllm.bench.model import model
from minivllm.bench.parts.attention import attention
from minivllm.bench.parts.overhead import overhead
from minivllm.bench.parts.roofline import roofline
from minivllm.bench.reports.compare import compare
from minivllm.bench.serve import serve
from minivllm.bench.speculation import speculation
from minivllm.bench.startup import startup
from minivllm.bench.throughput import throughput

bench = typer.Typer(rich_markup_mode=None)
for command in (model, throughput, speculation, serve, startup, roofline, attention, overhead, compare):
    bench.command(command.__name__)(command)
