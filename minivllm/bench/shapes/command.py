"""``minivllm bench gpu``: engines in turn on the shapes of well-known models, one shape after the other."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from minivllm.bench.reports.report import (
    Comparison,
    Measurement,
    OutputOptions,
    Report,
    machine_text,
    make_report,
    publish,
    read_report,
)
from minivllm.bench.requests.workloads import Case, WorkloadCase, parse_case
from minivllm.bench.rounds.rounds import Outcome, SideOptions
from minivllm.bench.rounds.side_processes import SideSpec
from minivllm.bench.shapes.table import SHAPES, Shape
from minivllm.cli.engine.options import with_options
from minivllm.errors import ConfigError, ModelError

Result = TypeVar("Result", Measurement, Comparison)

_SHARE_OF_VLLM = 0.5
"""Of the device's memory: our engine lies beside it."""


@with_options
def gpu(
    sides: SideOptions,
    output: OutputOptions,
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(one.name for one in SHAPES)}; left out, all. Repeatable."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="No further shape begins after so many seconds.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Small sizes and short cases, to try the command without a GPU.")
    ] = False,
) -> None:
    """Measure engines on a GPU, on the shapes of well-known models with random weights.

    With --json FILE the results are kept after each shape. The same command later goes on with the shapes
    that FILE lacks, if it is of the same source and device.

    Example: minivllm bench gpu --vs vllm --peer-python vllm=PYTHON --repeats 3 --json gpu.json

    Without a GPU: minivllm bench gpu --tiny --repeats 1 --calibrate 0
    """
    chosen = _chosen(shape)
    specs = sides.specs()
    begun = time.monotonic()
    done: list[str] = []
    outcome = Outcome([], [], {}, [])
    earlier = _earlier(output.json_file, sides, tiny)
    if earlier is not None:
        done += earlier.configuration["shapes"]
        kept = (earlier.measurements, earlier.comparisons, earlier.configuration["sides"], earlier.notes)
        outcome = Outcome(*kept)
    for one in chosen:
        if one.name in done:
            continue
        if seconds is not None and time.monotonic() - begun > seconds:
            break
        sized = one.tiny() if tiny else one
        found = _measured(sized, sides, specs)
        outcome.measurements.extend(_with_shape(sized, found.measurements))
        outcome.comparisons.extend(_with_shape(sized, found.comparisons))
        outcome.facts[one.name] = found.facts
        outcome.notes.extend(f"{one.name}: {note}" for note in found.notes)
        done.append(one.name)
        publish(_report(outcome, sides, done, tiny), output)
    missing = [one.name for one in chosen if one.name not in done]
    if missing:
        raise ModelError(f"There was no time for {', '.join(missing)}: give the same command again.")


def _chosen(names: Sequence[str] | None) -> list[Shape]:
    by_name = {one.name: one for one in SHAPES}
    for name in names or ():
        if name not in by_name:
            raise ConfigError(f"{name!r} is no shape; there are: {', '.join(by_name)}.")
    return [by_name[name] for name in names or by_name]


def _with_shape(shape: Shape, results: Iterable[Result]) -> list[Result]:
    """The shape's name stands before that of each case."""
    return [msgspec.structs.replace(result, case=f"{shape.name}: {result.case}") for result in results]


def _report(outcome: Outcome, sides: SideOptions, done: Sequence[str], tiny: bool) -> Report:
    configuration = {**sides.settings(), "tiny": tiny, "shapes": list(done), "sides": outcome.facts}
    return make_report("gpu", configuration, outcome.measurements, outcome.comparisons, outcome.notes)


def _earlier(path: Path | None, sides: SideOptions, tiny: bool) -> Report | None:
    """What the file has already. Raises ConfigError for results of another source, machine or comparison."""
    if path is None or not path.exists():
        return None
    found = read_report(path)
    now = _report(Outcome([], [], {}, []), sides, [], tiny)

    def identity(report: Report) -> dict[str, Any]:
        settings = {name: report.configuration.get(name) for name in (*sides.settings(), "tiny")}
        return {
            "kind": report.kind,
            "commit": report.commit,
            "machine": machine_text(report),
            **settings,
        }

    differing = [name for name, value in identity(now).items() if identity(found)[name] != value]
    if differing:
        raise ConfigError(
            f"{path} has results with another {', '.join(differing)}: move it away, or give another --json."
        )
    return found


def _measured(shape: Shape, sides: SideOptions, specs: Sequence[SideSpec]) -> Outcome:
    """All cases of a shape, on all sides."""
    cases: list[Case] = []
    for text in shape.cases:
        case = parse_case(text)
        cases.append(replace(case, at_a_time=shape.at_a_time) if isinstance(case, WorkloadCase) else case)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(shape.config)), encoding="utf-8")
        return sides.measure(cases, directory, [_on_random_weights(spec) for spec in specs])


def _on_random_weights(spec: SideSpec) -> SideSpec:
    """Raises ConfigError for an engine that cannot make weights."""
    if spec.engine not in ("minivllm", "vllm"):
        raise ConfigError(f"{spec.engine} cannot make random weights: compare with vllm or minivllm,….")
    given: dict[str, Any] = {"load_format": "dummy"}
    if spec.engine == "vllm":
        given["gpu_memory_utilization"] = _SHARE_OF_VLLM
    return replace(spec, arguments={**given, **spec.arguments})
