"""``minivllm env``: what is installed, what the machine has, what the engine would use, and why."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from minivllm.cli.engine.engine_start import ProgressHandler
from minivllm.cli.machine.findings import collect
from minivllm.cli.machine.model_findings import implementation, kv_cache_pools
from minivllm.cli.terminal.terminal_text import format_bytes
from minivllm.errors import ConfigError

UNLIMITED = 100_000
"""Columns."""


def env(
    model: Annotated[
        str | None,
        typer.Argument(help="Also show the implementation of this model, and the contents of its KV cache."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")] = False,
    program: Annotated[
        bool,
        typer.Option(
            "--program",
            help="Show the pieces and seams of the model instead, where they are, and its compiled regions.",
        ),
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "--tp", min=1, help="Ranks that divide each layer, for --program."
        ),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "--pp", min=1, help="Pipeline stages, for --program.")
    ] = 1,
    images: Annotated[
        bool, typer.Option("--images", help="Show the program of a step with images, for --program.")
    ] = False,
) -> None:
    """Show versions, devices, what will be used and why.

    Example: minivllm env --json
    """
    if program:
        if model is None or as_json:
            raise ConfigError(
                "--program shows the program of a model as a table: name the model, and leave out --json."
            )
        from rich.console import Console

        from minivllm.cli.machine.program_table import program_tables

        # A line of a file or a pipe is as long as its row.
        console = Console(width=None if sys.stdout.isatty() else UNLIMITED, highlight=False, markup=False)
        for table in program_tables(model, tensor_parallel_size, pipeline_parallel_size, images=images):
            console.print(table)
        return
    if images or (tensor_parallel_size, pipeline_parallel_size) != (1, 1):
        raise ConfigError("--tp, --pp and --images say which program is shown: add --program and the model.")
    with ProgressHandler(verbose=False).status("Asking PyTorch what it finds here"):
        report = collect()
        if model is not None:
            report["defaults"]["implementation"] = implementation(model)
            report["kv_cache_pools"] = kv_cache_pools(model)
    print(json.dumps(report, indent=2) if as_json else _readable(report))


def _readable(report: dict[str, Any]) -> str:
    memory, cpu = report["memory"], report["cpu"]
    lines = [f"{name:<14} {value or 'not installed'}" for name, value in report["versions"].items()]
    lines += [
        f"{'platform':<14} {report['platform']}",
        f"{'cpu':<14} {cpu['model']}, {cpu['usable_cores']} usable cores; "
        f"{' '.join(cpu['flags']) or 'no known flags'}",
        f"{'memory':<14} {_size(memory['total'])}, {_size(memory['available'])} available",
    ]
    for index, device in enumerate(report["cuda_devices"]):
        lines.append(
            f"{f'cuda:{index}':<14} {device['name']}, compute capability {device['compute_capability']}, "
            f"{format_bytes(device['memory'])}"
        )
    if not report["cuda_devices"]:
        lines.append(f"{'cuda':<14} no device")
    lines.append(f"{'C++ compiler':<14} {report['cpp_compiler'] or 'not found'}")
    lines += ["", "What an engine uses unless told otherwise:"]
    lines += [
        f"{name:<22} {choice['value']} ({choice['why']})" for name, choice in report["defaults"].items()
    ]
    if "kv_cache_pools" in report:
        lines += _readable_pools(report["kv_cache_pools"])
    lines += ["", "Directories:"]
    lines += [f"{name:<14} {path}" for name, path in report["directories"].items()]
    return "\n".join(lines)


def _readable_pools(planned: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"Its KV cache, for requests of up to {planned['max_model_len']:,} tokens ({planned['why']}):",
    ]
    for pool in planned["pools"]:
        held = f"{pool['blocks']:,} states"
        if pool["tokens"] is not None:
            held = f"{pool['blocks']:,} blocks of {pool['block_size']} tokens, {pool['tokens']:,} tokens"
        lines.append(f"{pool['kind']:<22} {pool['layers']} layers, {held} in {format_bytes(pool['bytes'])}")
    return lines


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)
