"""``minivllm bench throughput``: rates and latencies of a workload, under one load or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated

import typer

from minivllm.bench.reports.report import Measurement, OutputOptions, make_report, publish
from minivllm.bench.reports.statistics import knee, median
from minivllm.bench.rounds.rounds import SideOptions
from minivllm.bench.workloads.cases import WorkloadCase
from minivllm.bench.workloads.workloads import FORMS
from minivllm.cli.options.engine_options import ModelArgument, with_model_option
from minivllm.cli.options.option_groups import with_option_groups
from minivllm.errors import ConfigError

WORKLOAD_HELP = "What is sent, with random token ids: " + "; ".join(FORMS) + "."


@with_option_groups
@with_model_option
def throughput(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    workload: Annotated[list[str] | None, typer.Option(help=WORKLOAD_HELP + " Repeatable.")] = None,
    rates: Annotated[
        str | None,
        typer.Option(help="Poisson arrivals per second in place of its own, one rate after the other, ascending."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Requests that start together, ascending: in place of REQUESTS of a fixed workload."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    at_a_time: Annotated[
        int, typer.Option(min=1, help="Most requests that an engine is sized to run at the same time.")
    ] = 64,
) -> None:
    """Measure requests and tokens per second of a workload, and the latencies that its requests see.

    Several --rates or --batches raise the load step by step and find the knee: from there on more brings little but
    latency.

    Example: minivllm bench throughput --workload fixed:16:128:64 --vs transformers-cb

    Latency of one request at a time: minivllm bench throughput --workload fixed:1:128:64

    A curve: minivllm bench throughput --batches 1,2,4,8,16,32 --png curve.png
    """
    texts = workload or ["fixed:16:128:64"]
    cases = [WorkloadCase(text, at_a_time, seed) for text in texts]
    if rates is not None and batches is not None:
        raise ConfigError("--rates and --batches exclude each other: give one of them.")
    if rates is not None:
        loads = parse_loads("--rates", rates)
        cases = [WorkloadCase(text, at_a_time, seed, rate=load, x=load) for text in texts for load in loads]
    if batches is not None:
        if len(texts) > 1 or not texts[0].startswith("fixed:"):
            raise ConfigError(f"--batches goes with one fixed workload, not with {', '.join(texts)}.")
        lengths = texts[0].split(":")[2:]
        sizes = [int(load) for load in parse_loads("--batches", batches, whole=True)]
        cases = [WorkloadCase(":".join(["fixed", str(size), *lengths]), size, seed, x=size) for size in sizes]
    outcome = sides.measure(cases, model)
    over = "rate" if rates is not None else "batch"
    notes = outcome.notes
    if len(texts) == 1 and len(cases) > 1:
        notes = [*(knee_note(name, over, outcome.measurements) for name in outcome.facts), *notes]
    configuration = {"model": model, **sides.settings(), "cases": list(map(asdict, cases)), "sides": outcome.facts}
    publish(make_report("throughput", configuration, outcome.measurements, outcome.comparisons, notes), output)


def parse_loads(option: str, text: str, whole: bool = False) -> list[float]:
    """ "1,2,4" -> ascending loads above 0. Raises ConfigError."""
    try:
        loads = [float(int(part)) if whole else float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load < 1e6 for load in loads) or any(a >= b for a, b in pairwise(loads)):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{option} is {text!r}, but must be ascending {kind} above 0, such as 1,2,4.")
    return loads


def knee_note(side: str, over: str, measurements: Sequence[Measurement]) -> str:
    """Where the output rate of a side stops following the load, in a sentence."""

    def points(metric: str) -> dict[float, float]:
        own = [one for one in measurements if one.side == side and one.metric == metric and one.samples]
        return {one.x: median(one.samples) for one in own if one.x is not None}

    rates, per_token = points("output"), points("TPOT")
    loads = sorted(rates)
    if len(loads) < 2:
        return f"{side}: too few points for a knee."
    load = loads[knee(loads, [rates[load] for load in loads])]
    if load == loads[-1]:
        return f"{side}: no knee up to {over} {load:g} ({rates[load]:,.0f} output tok/s); try higher loads."
    tpot = f" at a TPOT of {per_token[load]:.3g} ms" if load in per_token else ""
    return (
        f"{side}: the knee is at {over} {load:g}: {rates[load]:,.0f} output tok/s{tpot}; "
        f"{over} {loads[-1]:g} gives {rates[loads[-1]] / rates[load]:.2f} × of that."
    )
