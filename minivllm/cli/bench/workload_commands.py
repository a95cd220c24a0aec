"""``minivllm bench latency``, ``throughput`` and ``sweep``: what requests experience, under one load or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated

import typer

from minivllm.cli.bench.cases import WorkloadCase
from minivllm.cli.bench.report import Measurement, OutputOptions, make_report, publish
from minivllm.cli.bench.rounds import Outcome, SideOptions, measure_in_turn
from minivllm.cli.bench.statistics import knee, median
from minivllm.cli.bench.workloads import FORMS
from minivllm.cli.engine_options import ModelArgument, with_model_option
from minivllm.cli.option_groups import with_option_groups
from minivllm.errors import ConfigError

WORKLOAD_HELP = "What is sent, with random token ids: " + "; ".join(FORMS) + "."
SweptModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="As elsewhere. With --url the name to ask for. [default: smollm2, or the first it has]"
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server in place of engines in this machine's memory."""

    url: Annotated[
        str | None, typer.Option(help="Where a running server's /v1 is: sweep the rate of its requests.")
    ] = None
    api_key: Annotated[str | None, typer.Option(help="Bearer key for --url.", envvar="MINIVLLM_API_KEY")] = None
    endpoint: Annotated[str, typer.Option(help="Of --url: completions, or chat for servers without ids.")] = (
        "completions"
    )
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts for --url are random token ids below this.")] = 1000
    slo: Annotated[str | None, typer.Option(help="Limits in ms for goodput with --url, such as ttft:500,tpot:50.")] = (
        None
    )


AtATime = Annotated[int, typer.Option(min=1, help="Most requests that an engine is sized to run at the same time.")]


@with_option_groups
@with_model_option
def latency(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    batch: Annotated[int, typer.Option(min=1, help="Requests that start together.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 64,
) -> None:
    """Measure TTFT, TPOT, ITL and E2E of a fixed batch.

    Example: minivllm bench latency --batch 4 --prompt-tokens 256
    """
    case = WorkloadCase(f"fixed:{batch}:{prompt_tokens}:{new_tokens}", at_a_time=batch, rates_too=False)
    outcome = measure_in_turn(sides.specs(), [case], model=model, dtype=sides.dtype, repeats=sides.repeats)
    _publish("latency", model, sides, [case], outcome, [], output)


@with_option_groups
@with_model_option
def throughput(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    workload: Annotated[list[str] | None, typer.Option(help=WORKLOAD_HELP + " Repeatable.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Poisson arrivals per second in place of its own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    at_a_time: AtATime = 64,
) -> None:
    """Measure requests and tokens per second of a workload, and the latencies that its requests see.

    Example: minivllm bench throughput --workload fixed:16:128:64 --vs transformers-cb
    """
    cases = [WorkloadCase(text, at_a_time, seed, rate) for text in workload or ["fixed:16:128:64"]]
    outcome = measure_in_turn(sides.specs(), cases, model=model, dtype=sides.dtype, repeats=sides.repeats)
    _publish("throughput", model, sides, cases, outcome, [], output)


@with_option_groups
@with_model_option
def sweep(
    sides: SideOptions,
    server: ServerOptions,
    output: OutputOptions,
    model: SweptModel = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="batch: requests that start together. rate: arrivals per second. [default: batch; with --url rate]"
        ),
    ] = None,
    values: Annotated[str, typer.Option(help="Loads to try, ascending.")] = "1,2,4,8,16,32",
    workload: Annotated[
        str | None,
        typer.Option(help="What arrives in a sweep over the rate; see bench throughput. [default: random:64:32:256]"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, in a sweep over the batch.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each request, in a sweep over the batch.")] = 64,
    at_a_time: AtATime = 64,
) -> None:
    """Raise the load step by step and find the knee: from there on more load brings little but latency.

    Example: minivllm bench sweep --over rate --values 0.5,1,2,4 --workload random:64:32:256

    A server: minivllm bench sweep --url http://127.0.0.1:8000 --values 0.5,1,2,4 --slo ttft:500,tpot:50 --png sweep.png
    """
    over = over or ("batch" if server.url is None else "rate")
    loads = parse_loads(values, whole=over == "batch")
    if server.url is not None:
        _sweep_server(server.url, loads, sides, server, output, model, over, workload)
        return
    if server.slo is not None:
        raise ConfigError("--slo is about what clients of a server experience: give its --url.")
    model = model or "smollm2"
    if over == "rate":
        text = workload or "random:64:32:256"
        cases = [WorkloadCase(text, at_a_time, rate=load, x=load) for load in loads]
    elif over == "batch" and workload is None:
        cases = [WorkloadCase(f"fixed:{load:g}:{prompt_tokens}:{new_tokens}", int(load), x=load) for load in loads]
    elif over == "batch":
        raise ConfigError("--workload belongs to a sweep over the rate; over the batch, set --prompt-tokens instead.")
    else:
        raise ConfigError(f"--over is {over!r}, but must be batch or rate.")
    outcome = measure_in_turn(sides.specs(), cases, model=model, dtype=sides.dtype, repeats=sides.repeats)
    notes = [knee_note(name, over, outcome.measurements) for name in outcome.facts]
    _publish("sweep", model, sides, cases, outcome, notes, output)


def _sweep_server(
    url: str,
    rates: list[float],
    sides: SideOptions,
    server: ServerOptions,
    output: OutputOptions,
    model: str | None,
    over: str,
    workload: str | None,
) -> None:
    from minivllm.cli.bench.serve_sweep import sweep_server

    if over != "rate":
        raise ConfigError(f"--over is {over!r}, but with --url it must be rate: a server decides its batches itself.")
    if (sides.engine, sides.vs, sides.dtype) != ("minivllm", None, "auto"):
        raise ConfigError("--engine, --vs and --dtype choose engines in this process: leave them out with --url.")
    text = workload or "random:64:32:256"
    found = sweep_server(
        rates,
        workload=text,
        repeats=sides.repeats,
        url=url,
        model=model,
        api_key=server.api_key,
        endpoint=server.endpoint,
        vocab_size=server.vocab_size,
        slo=server.slo,
    )
    configuration = {
        "target": found.target,
        "workload": text,
        "rates": rates,
        "repeats": sides.repeats,
        "vocab_size": server.vocab_size,
        "slo": server.slo,
    }
    notes = [knee_note(found.side, "rate", found.measurements), *found.notes]
    publish(make_report("sweep", configuration, found.measurements, notes=notes), output)


def parse_loads(text: str, whole: bool) -> list[float]:
    """ "1,2,4" -> at least two ascending loads above 0. Raises ConfigError."""
    try:
        loads = [float(int(part)) if whole else float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if len(loads) < 2 or not all(0 < load < 1e6 for load in loads) or any(a >= b for a, b in pairwise(loads)):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"--values is {text!r}, but must be at least two ascending {kind} above 0, such as 1,2,4.")
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


def _publish(
    kind: str,
    model: str,
    sides: SideOptions,
    cases: Sequence[WorkloadCase],
    outcome: Outcome,
    notes: Sequence[str],
    output: OutputOptions,
) -> None:
    configuration = {
        "model": model,
        **asdict(sides),
        "cases": [asdict(case) for case in cases],
        "sides": outcome.facts,
    }
    publish(make_report(kind, configuration, outcome.measurements, outcome.comparisons, notes), output)
