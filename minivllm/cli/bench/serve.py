"""``minivllm bench serve``: what clients of an OpenAI-compatible server experience under load."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from minivllm.cli.bench.arrivals import FORMS as ARRIVAL_FORMS
from minivllm.cli.bench.arrivals import arrive
from minivllm.cli.bench.drive import Task
from minivllm.cli.bench.figures import (
    Figure,
    error_figures,
    latency_figures,
    time_per_output_token,
    time_to_first_token,
)
from minivllm.cli.bench.report import Comparison, Measurement, OutputOptions, make_report, publish, read_report
from minivllm.cli.bench.served_comparisons import against_in_process, overload_note
from minivllm.cli.bench.served_requests import Endpoint, LoadGenerator, ServedRecord, Target
from minivllm.cli.bench.workload_commands import WORKLOAD_HELP
from minivllm.cli.bench.workloads import make_workload
from minivllm.cli.openai_server import key_header, served_models, server_root
from minivllm.cli.option_groups import with_option_groups
from minivllm.errors import ConfigError, RequestError

NUM_WARMUP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is sent, and when."""

    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)] = "random:64:32:256"
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: requests at a time; the next is sent when one ends. [default: 8]"),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Open loop, in place of --concurrency: " + "; ".join(f"{a} ({b})" for a, b in ARRIVAL_FORMS.items())
        ),
    ] = None
    overload: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Then send the workload again, so many times as fast as the server managed in the closed loop: what "
            "becomes of those who are admitted, and how soon the others are told 429.",
        ),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(help="Limits in ms that a request must keep to count for goodput, such as ttft:500,tpot:50."),
    ] = None
    cancel_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of requests whose client leaves early.")] = 0.0
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 1000
    seed: Annotated[int, typer.Option(help="Of lengths, contents, arrivals and cancellations.")] = 0


@with_option_groups
def serve(
    load: LoadOptions,
    output: OutputOptions,
    url: Annotated[str, typer.Option(help="Where the server's /v1 is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name to ask for. [default: the first of /v1/models]")] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer key.", envvar="MINIVLLM_API_KEY")] = None,
    endpoint: Annotated[
        str, typer.Option(help="completions sends token ids; chat sends a word for each, for servers without ids.")
    ] = "completions",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for full lengths; not every server knows ignore_eos.")] = True,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte that end a request.")] = 600.0,
    against: Annotated[
        Path | None,
        typer.Option(help="JSON of bench throughput on the same workload: what the server costs beside in process."),
    ] = None,
) -> None:
    """Measure an OpenAI-compatible server under load: TTFT, TPOT, ITL, E2E, rates, goodput, errors by class.

    TTFT counts from the moment a request was due, not from when it could be sent. Tokens are counted by the server's
    own usage, for a chunk is not a token. A request that failed counts as failed, and for nothing else.

    Example: minivllm bench serve --url http://127.0.0.1:8000 --arrivals poisson:2 --slo ttft:500,tpot:50

    Overload: minivllm bench serve --workload random:512:16:64 --concurrency 8 --overload 10

    Beside in process: minivllm bench throughput --workload fixed:32:128:64 --json a.json, then with a server of the
    same model minivllm bench serve --workload fixed:32:128:64 --concurrency 32 --against a.json
    """
    if load.concurrency is not None and load.arrivals is not None:
        raise ConfigError(
            "--concurrency (closed loop) and --arrivals (open loop) exclude each other: give one of them."
        )
    if load.overload is not None and load.arrivals is not None:
        raise ConfigError("--overload measures a closed loop first, so it excludes --arrivals: give --concurrency.")
    slo = parse_slo(load.slo)
    in_process = None if against is None else read_report(against)
    usual = Load(load, concurrency=None if load.arrivals is not None else load.concurrency or 8, arrivals=load.arrivals)
    tasks = usual.tasks()
    target = find_target(url, model, api_key, endpoint, ignore_eos, timeout)
    warm_up(target, load)
    records, seconds = send(target, usual, tasks, show=True)
    measurements = served_measurements(target, usual.name, records, seconds, slo)
    comparisons: list[Comparison] = []
    notes = notes_on(records)
    if in_process is not None:
        beside, comparisons, note = against_in_process(in_process, load.workload, measurements)
        measurements += beside
        notes.append(note)
    if load.overload is not None:
        rate = load.overload * sum(record.error is None for record in records) / seconds
        if rate == 0:
            raise RequestError(f"No request succeeded, so there is no rate to overload. {' '.join(notes)}")
        # Fresh prompts, so that no cache answers for the overloaded engine.
        over = Load(load, arrivals=f"poisson:{rate:.6g}", repetition=1, label=f"{load.overload:g} × that rate")
        overloaded, their_seconds = send(target, over, over.tasks(), show=True)
        measurements += served_measurements(target, over.name, overloaded, their_seconds, slo)
        notes += [*notes_on(overloaded), overload_note(records, overloaded)]
    configuration = {
        **asdict(load),
        "concurrency": usual.concurrency,
        "against": None if against is None else str(against),
        "target": {name: value for name, value in asdict(target).items() if name != "api_key"},
        "num_requests": len(records),
        "seconds": seconds,
    }
    publish(make_report("serve", configuration, measurements, comparisons, notes), output)


def find_target(
    url: str, model: str | None, api_key: str | None, endpoint: str, ignore_eos: bool = True, timeout: float = 600.0
) -> Target:
    """What is measured; without a model's name, the first one that the server has.

    Raises ConfigError for what cannot be measured, and what served_models raises for a server that does not answer.
    """
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("Measuring a server needs httpx: pip install 'minivllm[bench]'.")
    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint is {endpoint!r}, but must be completions or chat.")
    root = server_root(url)
    return Target(
        url=root,
        endpoint=cast(Endpoint, endpoint),
        model=served_models(root, key_header(api_key))[0]["id"] if model is None else model,
        api_key=api_key,
        ignore_eos=ignore_eos,
        timeout=timeout,
    )


def warm_up(target: Target, load: LoadOptions) -> None:
    """Send a few requests one by one, whatever becomes of them."""
    warmup = Load(load, concurrency=1, repetition=-1)
    send(target, warmup, [replace(task, arrival=0.0, after=None) for task in warmup.tasks()[:NUM_WARMUP_REQUESTS]])


@dataclass(frozen=True)
class Load:
    """One run of the workload. repetition: which contents it has. label: how the run is called, if not by its load."""

    options: LoadOptions
    concurrency: int | None = None
    arrivals: str | None = None
    repetition: int = 0
    label: str | None = None

    @property
    def name(self) -> str:
        return f"{self.options.workload}, {self.label or self.arrivals or f'{self.concurrency} at a time'}"

    def tasks(self) -> list[Task]:
        options = self.options
        workload = make_workload(options.workload, options.vocab_size, options.seed, self.repetition)
        if self.arrivals is not None:
            workload = arrive(workload, self.arrivals, options.seed)
        return workload.tasks


def send(target: Target, load: Load, tasks: Sequence[Task], show: bool = False) -> tuple[list[ServedRecord], float]:
    """All records, and the time from the start to the last end [seconds]. show: a progress bar."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (show and console.is_terminal)) as progress:
        bar = progress.add_task(f"{len(tasks)} requests", total=len(tasks))
        generator = LoadGenerator(
            target,
            concurrency=load.concurrency,
            cancel_rate=load.options.cancel_rate if show else 0.0,
            seed=load.options.seed,
            on_end=lambda: progress.advance(bar),
        )
        return asyncio.run(generator.run(tasks))


def served_measurements(
    target: Target,
    case: str,
    records: Sequence[ServedRecord],
    seconds: float,
    slo: dict[str, float],
    x: float | None = None,
) -> list[Measurement]:
    """The figures of one run; x: its place on the axis of a sweep."""
    return [
        Measurement(
            case=case,
            side=target.model or "server",
            metric=one.metric,
            unit=one.unit,
            better=one.better,
            samples=one.samples,
            x=x,
        )
        for one in served_figures(records, seconds, slo)
    ]


def parse_slo(text: str | None) -> dict[str, float]:
    """ "ttft:500,tpot:50" -> limits [ms]. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2e") or not 0 < limits[name] < float("inf"):
            raise ConfigError(f"--slo is {text!r}, but must be limits in ms of ttft, tpot or e2e: ttft:500,tpot:50.")
    return limits


def served_figures(records: Sequence[ServedRecord], seconds: float, slo: dict[str, float]) -> list[Figure]:
    """Latencies and rates of the requests that succeeded, goodput under ``slo`` [ms], errors by class.

    Requests that were cancelled on purpose are counted, and stand for nothing else.
    """
    asked = [record for record in records if not record.cancelled]
    good = [record for record in asked if record.error is None]
    num_output, num_prompt = sum(len(r.times) for r in good), sum(r.num_prompt_tokens for r in good)
    figures = [
        *latency_figures(good),
        Figure("requests", "req/s", "higher", [len(good) / seconds]),
        Figure("output", "tok/s", "higher", [num_output / seconds]),
        Figure("prompt and output", "tok/s", "higher", [(num_prompt + num_output) / seconds]),
    ]
    if slo:
        kept = sum(keeps(record, slo) for record in good)
        figures.append(Figure("goodput", "req/s", "higher", [kept / seconds]))
        figures.append(Figure("within the SLO", "share", "higher", [kept / len(asked)] if asked else []))
    if len(asked) < len(records):
        figures.append(Figure("cancelled", "count", "neither", [float(len(records) - len(asked))]))
    refused = [1e3 * record.refused_after for record in records if record.refused_after is not None]
    if refused:
        figures.append(Figure("time to 429", "ms", "lower", refused))
    return figures + error_figures(records)


def keeps(record: ServedRecord, slo: dict[str, float]) -> bool:
    """True if a request that succeeded stayed within every limit [ms]."""
    if not record.times:
        return False
    found = {"ttft": time_to_first_token(record), "e2e": record.times[-1] - record.arrival}
    found["tpot"] = time_per_output_token(record) if len(record.times) > 1 else 0.0
    return all(1e3 * found[name] <= limit for name, limit in slo.items())


def notes_on(records: Sequence[ServedRecord]) -> list[str]:
    """What the figures do not say: a sentence of every class of error, and chunks that are not tokens."""
    notes = []
    examples = {record.error.partition(":")[0]: record.error for record in records if record.error is not None}
    counts = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    notes += [f"{counts[name]} × {error}" for name, error in examples.items()]
    good = [record for record in records if record.error is None and not record.cancelled]
    num_tokens, num_chunks = sum(len(r.times) for r in good), sum(r.num_chunks for r in good)
    if num_chunks and num_tokens != num_chunks:
        notes.append(f"{num_tokens:,} tokens came in {num_chunks:,} chunks: ITL shares each gap among its tokens.")
    return notes
