"""``minivllm bench compare``: did anything become slower between two files of results?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from minivllm.bench.reports.report import MOST_REPORT_BYTES, Better, figure_text, read_report
from minivllm.bench.reports.statistics import median, ratio_interval
from minivllm.cli.terminal.typed_paths import read_typed_file
from minivllm.errors import RequestError

Key = tuple[str, str, str]
"""(case, metric, side)."""


@dataclass(frozen=True)
class Series:
    """Samples of one metric in one file."""

    unit: str
    better: Better
    samples: list[float]


@dataclass(frozen=True)
class Results:
    """What one file holds. setting: what must be equal for a comparison to mean something."""

    series: dict[Key, Series]
    setting: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """From one file to the next: ratio above 1 is better, with its 95 % interval."""

    key: Key
    unit: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str


def compare(
    before: Annotated[Path, typer.Argument(help="JSON of minivllm bench, or of pytest --benchmark-json.")],
    after: Annotated[Path, typer.Argument(help="The same, later.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share by which a median may be worse before it is a regression.")
    ] = 0.05,
) -> None:
    """Compare two files of results; exit with 1 if something became worse.

    Worse is a ratio of medians beyond the threshold whose 95 % bootstrap interval lies below 1.

    Example: minivllm bench compare before.json after.json --threshold 0.05
    """
    old, new = read_results(before), read_results(after)
    found = changes(old, new, threshold)
    if not found:
        raise RequestError(f"{before} and {after} have no measurement in common.")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(title="ratio above 1: better")
    for index, column in enumerate(
        ("case", "metric", "engine", "before", "after", "ratio", "95 % interval", "verdict")
    ):
        table.add_column(column, justify="right" if 3 <= index < 7 else "left", overflow="fold")
    for one in found:
        case, metric, side = one.key
        values = figure_text(one.before, one.unit), figure_text(one.after, one.unit)
        table.add_row(case, metric, side, *values, f"{one.ratio:.2f} ×", f"{one.low:.2f} – {one.high:.2f}", one.verdict)
    console.print(table)
    for name in sorted(set(old.setting) | set(new.setting)):
        if old.setting.get(name) != new.setting.get(name):
            console.print(f"Mind: {name} differs between the files.", markup=False)
    for case, metric, side in sorted(set(old.series) - set(new.series)):
        console.print(f"Only before: {case}, {metric}, {side}", markup=False, highlight=False)
    worse = [one for one in found if one.verdict == "worse"]
    console.print(f"{len(worse)} of {len(found)} became worse by more than {threshold:.0%}.", highlight=False)
    if worse:
        raise typer.Exit(1)


def changes(old: Results, new: Results, threshold: float) -> list[Change]:
    """What both files hold, in the order of the first."""
    found = []
    for key, before in old.series.items():
        after = new.series.get(key)
        if after is None or not before.samples or not after.samples:
            continue
        first, second = (after, before) if before.better == "higher" else (before, after)
        ratio, low, high = ratio_interval(first.samples, second.samples)
        verdict = "same"
        if ratio < 1 - threshold and high < 1:
            verdict = "worse"
        elif low > 1 and ratio > 1 + threshold:
            verdict = "better"
        medians = median(before.samples), median(after.samples)
        found.append(Change(key, before.unit, *medians, ratio, low, high, verdict))
    return found


def read_results(path: Path) -> Results:
    """A file of minivllm bench or pytest-benchmark. Raises RequestError for anything else."""
    try:
        content = msgspec.json.decode(read_typed_file(path, MOST_REPORT_BYTES), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} holds no results: {error}.") from None
    if "benchmarks" in content:
        return _of_pytest(path, content)
    report = read_report(path)
    series = {
        (one.case, one.metric, one.side): Series(one.unit, one.better, one.samples)
        for one in report.measurements
        if one.better != "neither"
    }
    machine = {name: report.machine.get(name) for name in ("platform", "cpu", "cuda_devices", "threads")}
    return Results(series, {"the machine": machine, "the versions": report.versions})


def _of_pytest(path: Path, content: dict[str, Any]) -> Results:
    """pytest-benchmark keeps every round with --benchmark-json, and without them at least the median [seconds]."""
    series: dict[Key, Series] = {}
    try:
        for entry in content["benchmarks"]:
            stats = entry["stats"]
            samples = [1e3 * float(value) for value in stats.get("data") or [stats["median"]]]
            series[str(entry["fullname"]), "time", "pytest"] = Series("ms", "lower", samples)
    except (KeyError, TypeError, ValueError):
        raise RequestError(f"{path} looks like results of pytest-benchmark, but an entry has no times.") from None
    cpu = (content.get("machine_info") or {}).get("cpu") or {}
    return Results(series, {"the machine": cpu.get("brand_raw")})
