"""``minivllm bench overhead``: the cost of a step outside the model, and of handing it to workers.

With workers in processes of their own a step crosses a border twice. It is encoded, written into the ring
that all workers read, and wakes them up; the answer of the output rank comes back through its socket. The
last two are told by calls of the workers that do nothing but look at the clock, which all processes of a host
share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from minivllm.bench.parts.parts import (
    HOST_PARTS,
    SETTLING_STEPS,
    decode_args,
    engine_core,
    start_decoding,
    time_steps,
)
from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Measurement, OutputOptions, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs
from minivllm.profiling.spans import listen

IN_PROCESS = HOST_PARTS
BESIDE_WORKERS = {
    "schedule": "schedule",
    "encode": "encode",
    "ring write": "write",
    "wait for the answer": "wait",
    "update from output": "output",
    "frontend": "frontend",
}
"""Spans of a step in the engine's process if workers have separate processes:
name of the part -> its span."""


def broadcast_seconds(collective: Callable[[str], list[float]], count: int) -> dict[str, list[float]]:
    """(From the end of the write until the last worker has woken up, and from there until all answers are
    back) of ``count`` calls that do nothing [seconds]."""
    found: dict[str, list[float]] = {"wake-up": [], "answer": []}
    written: list[float] = []

    def begin(name: str, subject: object) -> Callable[[], None]:
        return lambda: written.append(time.perf_counter())

    with listen(begin, {"write"}):
        for _ in range(count):
            awake = max(collective("clock"))
            back = time.perf_counter()
            found["wake-up"].append(
                max(0.0, awake - written[-1])
            )  # a worker may be awake before the write returns
            found["answer"].append(back - awake)
    return found


@with_options
def overhead(
    args: EngineArgs,
    output: OutputOptions,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt before decoding.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to measure.")] = 100,
) -> None:
    """Measure the cost of a step outside the model:
    scheduling, inputs, outputs, and the way to workers and back.

    With workers in separate processes: encode and ring write of every step, the wake-up of the slowest
    worker, and the return of its answer. The workers are idle before a step, so they wake up as those of a
    busy machine do not.

    Example: minivllm bench overhead --distributed-executor-backend mp --batch 64

    Two workers: minivllm bench overhead --tensor-parallel-size 2
    """
    from minivllm.frontend.llm_engine import LLMEngine

    new_tokens = steps + SETTLING_STEPS + 8
    args = decode_args(args, batch, context + new_tokens)
    with LLMEngine.from_args(args) as engine:
        core = engine_core(engine)
        crosses = core.config.executor == "mp"
        broadcast: dict[str, list[float]] = {}
        if crosses:
            broadcast_seconds(core.executor.collective, SETTLING_STEPS)
            broadcast = broadcast_seconds(core.executor.collective, steps)
        start_decoding(engine, batch, context, new_tokens)
        time_steps(engine, SETTLING_STEPS)
        times = time_steps(engine, steps, BESIDE_WORKERS if crosses else IN_PROCESS)
    waited = times.parts.get("wait for the answer", [0.0] * steps)
    own = {name: seconds for name, seconds in times.parts.items() if name != "wait for the answer"}
    totals = [sum(parts) for parts in zip(*own.values(), *broadcast.values())]
    case = f"decode, batch {batch}"
    rows: dict[str, list[float]] = {**own, **broadcast, "overhead": totals, "step": times.whole}
    measurements = [
        Measurement(case, "minivllm", name, "ms", "lower", [1e3 * second for second in seconds])
        for name, seconds in rows.items()
    ]
    share = median(totals) / median(times.whole)
    notes = [f"Overhead is {share:.1%} of a step with {batch} running requests."]
    if crosses:
        way = sum(median(rows[name]) for name in ("encode", "ring write", "wake-up", "answer"))
        notes.append(
            f"The way to {core.config.num_workers} worker(s) and back takes {1e6 * way:.0f} µs; the core "
            "waits "
            f"{1e3 * median(waited):.3g} ms of a step for them."
        )
    configuration: dict[str, Any] = {"model": args.model, "engine": asdict(args)}
    publish(make_report("overhead", configuration, measurements, notes=notes), output)
