"""``minivllm bench sweep --url``: a server under one rate of arrivals after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.cli.bench.report import Measurement
from minivllm.cli.bench.serve import (
    Load,
    LoadOptions,
    find_target,
    notes_on,
    parse_slo,
    send,
    served_measurements,
    warm_up,
)


@dataclass(frozen=True, kw_only=True)
class ServerSweep:
    """What came out. side: the model's name, under which its measurements are. target: for the report, without key."""

    side: str
    measurements: list[Measurement]
    notes: list[str]
    target: dict[str, Any]


def sweep_server(
    rates: Sequence[float],
    *,
    workload: str,
    repeats: int,
    url: str,
    model: str | None,
    api_key: str | None,
    endpoint: str,
    vocab_size: int,
    slo: str | None,
) -> ServerSweep:
    """Send the workload with Poisson arrivals at every rate [requests/s], ``repeats`` times.

    The loop is open: requests are sent when they are due, whether or not the server keeps up. Every run has prompts of
    its own, so that no prefix cache answers for the engine. Raises ConfigError, and RequestError if the server is not
    there.
    """
    limits = parse_slo(slo)
    load = LoadOptions(workload=workload, vocab_size=vocab_size, slo=slo)
    runs = [
        Load(load, arrivals=f"poisson:{rate:.6g}", repetition=run) for run, rate in enumerate(list(rates) * repeats)
    ]
    tasks = [run.tasks() for run in runs]  # what is wrong with the workload is said before the server is asked
    target = find_target(url, model, api_key, endpoint)
    warm_up(target, load)
    merged: dict[tuple[str, str], Measurement] = {}
    notes: list[str] = []
    for run, own in zip(runs, tasks):
        records, seconds = send(target, run, own, show=True)
        rate = rates[run.repetition % len(rates)]
        for one in served_measurements(target, f"{workload} at {rate:g}/s", records, seconds, limits, x=rate):
            merged.setdefault((one.case, one.metric), one)
            if merged[one.case, one.metric] is not one:
                merged[one.case, one.metric].samples.extend(one.samples)
        notes += [f"{rate:g}/s: {note}" for note in notes_on(records)]
    measurements = sorted(merged.values(), key=lambda one: one.x or 0.0)
    return ServerSweep(
        side=target.model or "server",
        measurements=measurements,
        notes=notes,
        target={"url": target.url, "model": target.model, "endpoint": target.endpoint},
    )
