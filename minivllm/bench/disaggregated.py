"""``minivllm bench disaggregated``: one engine against a prefill and a decode engine, on the same machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm.bench.engines import parse_loads
from minivllm.bench.reports.figures import inter_token_latencies, time_to_first_token
from minivllm.bench.reports.report import (
    Comparison,
    Measurement,
    OutputOptions,
    compared,
    make_report,
    publish,
)
from minivllm.bench.requests.workloads import make_workload
from minivllm.bench.serve import LoadGenerator, ServedRecord, Target
from minivllm.bench.sides.drive import Task
from minivllm.cli.engine.engine_start import fetch_model
from minivllm.cli.engine.options import engine_flags, with_options
from minivllm.config import EngineArgs
from minivllm.errors import ModelError

if TYPE_CHECKING:
    from minivllm.server.proxy.children import Child

ONE, APART, LOADED = "one engine", "1P1D", "1P1D, prefilled before"


@dataclass(frozen=True)
class Servers:
    """Targets: an engine that does everything, a proxy, and the two engines of the proxy."""

    one: Target
    proxy: Target
    prefill: Target
    decode: Target


@with_options
def disaggregated(
    args: EngineArgs,
    output: OutputOptions,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths whose TTFT is measured, ascending.")
    ] = "256,2048,8000",
    repeats: Annotated[int, typer.Option(min=1, help="Fresh prompts of each length.")] = 5,
    workload: Annotated[
        str, typer.Option(help="Requests to compare ITL, a workload with arrivals.")
    ] = "prefill-load:4:400:4:1024:2",
    rounds: Annotated[int, typer.Option(min=1, help="How often the workload is sent, in turn.")] = 3,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 1000,
) -> None:
    """Measure the effect of separate prefill:
    TTFT by prompt length, and ITL of streams while long prompts arrive.

    Three engines are started on this machine and take turns: one that computes everything, and a prefill and
    a decode engine with a proxy, which divide the cores. "1P1D, prefilled before" is the TTFT of the decode
    engine alone when the prefill engine has the prompt's keys and values already: the cost of the transfer,
    against computing the prompt in one engine.

    Example: minivllm bench disaggregated smollm2 --json disaggregated.json
    """
    sizes = [int(size) for size in parse_loads("--lengths", lengths)]
    make_workload(workload, vocab_size)  # what is wrong with it is said before anything starts
    fetch_model(args)
    with started(args) as servers:
        measurements = ttft_by_length(servers, sizes, repeats, vocab_size)
        measurements += itl_under_load(servers, workload, rounds, vocab_size)
    configuration = {
        "engine": {name: value for name, value in asdict(args).items() if value is not None},
        "lengths": sizes,
        "repeats": repeats,
        "workload": workload,
        "rounds": rounds,
    }
    publish(make_report("disaggregated", configuration, measurements, against_one(measurements)), output)


def against_one(measurements: Sequence[Measurement]) -> list[Comparison]:
    """Every other side against the one engine."""
    found: list[Comparison] = []
    for case, side in dict.fromkeys((one.case, one.side) for one in measurements if one.side != ONE):
        ours, theirs = (
            {one.metric: one for one in measurements if (one.case, one.side) == (case, name)}
            for name in (side, ONE)
        )
        found += compared(ours, theirs)
    return found


@contextmanager
def started(args: EngineArgs) -> Iterator[Servers]:
    """All servers, ready; they end with the block. Raises EngineDeadError for one that does not start."""
    from minivllm.server.proxy.children import Children, Shape, started_child

    command = ["serve", args.model, *engine_flags(args), "--wait-for-compilation"]
    command += ["--stats-interval=0", "--drain-timeout=1"]
    children = Children(Shape(1, 1), command, (), drain_timeout=1.0, num_workers=args.num_workers)

    def target(child: Child) -> Target:
        return Target(url=child.url).found()

    try:
        asyncio.run(children.wait_until_ready())
        prefill, decode = children.prefill[0], children.decode[0]
        proxy = ["proxy", f"--prefill={prefill.url}", f"--decode={decode.url}", "--min-prefill-tokens=128"]
        with started_child("engine", command) as one, started_child("proxy", proxy) as front:
            yield Servers(target(one), target(front), target(prefill), target(decode))
    finally:
        children.close()


def send(target: Target, tasks: Sequence[Task]) -> list[ServedRecord]:
    """Raises ModelError if a request failed: a latency of the others would mean nothing."""
    records, _ = asyncio.run(LoadGenerator(target).run(tasks))
    for record in records:
        if record.error is not None:
            raise ModelError(f"A request to {target.url} failed: {record.error}")
    return records


def ttft_by_length(
    servers: Servers, lengths: Sequence[int], repeats: int, vocab_size: int
) -> list[Measurement]:
    """Nothing else is running. Each prompt is a new one; what warms up is not counted."""
    found = []
    for length in lengths:
        samples: dict[str, list[float]] = {ONE: [], LOADED: [], APART: []}
        for repeat in range(-1, repeats):
            source = random.Random(f"disaggregated/{length}/{repeat}")
            one, loaded, apart = (
                [Task([source.randrange(vocab_size) for _ in range(length)], 1)] for _ in range(3)
            )
            send(servers.prefill, loaded)
            for side, target, tasks in (
                (ONE, servers.one, one),
                (LOADED, servers.decode, loaded),
                (APART, servers.proxy, apart),
            ):
                seconds = time_to_first_token(send(target, tasks)[0])
                if repeat >= 0:
                    samples[side].append(1e3 * seconds)
        found += [
            Measurement(f"prompt of {length}", side, "TTFT", "ms", "lower", values, float(length))
            for side, values in samples.items()
        ]
    return found


def itl_under_load(servers: Servers, workload: str, rounds: int, vocab_size: int) -> list[Measurement]:
    """ITL of what streams, TTFT of what arrives meanwhile, by turns."""
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(-1, rounds):
        for side, target in ((ONE, servers.one), (APART, servers.proxy)):
            tasks = make_workload(workload, vocab_size, repetition=number)
            records = send(target, tasks)
            if number < 0:
                continue
            gaps = samples.setdefault((side, "ITL"), [])
            gaps += [1e3 * gap for record in records for gap in inter_token_latencies(record)]
            later = [record for task, record in zip(tasks, records) if task.arrival]
            samples.setdefault((side, "TTFT"), []).extend(
                1e3 * time_to_first_token(record) for record in later
            )
    return [
        Measurement(workload, side, metric, "ms", "lower", values)
        for (side, metric), values in samples.items()
        if values
    ]
