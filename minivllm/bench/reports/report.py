"""Results of a benchmark: one schema, the forms they are shown and kept in,
and two files of them compared."""

from __future__ import annotations

import csv
import io
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from minivllm.bench.reports.figures import Better, median, ratio_interval, summarize
from minivllm.cli.terminal.typed import read_typed_file
from minivllm.errors import ConfigError, ModelError, RequestError

SCHEMA_VERSION = 2
MOST_REPORT_BYTES = 256 * 2**20
TOLERANCE = 0.05
"""How much slower a peer may be here than when it is driven its own way."""
_MACHINE = ("platform", "cpu", "memory", "cuda_devices")
_PACKAGES = ("minivllm", "torch", "transformers", "python")
_FILES = ("--json", "--csv", "--markdown", "--png")


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples of one metric of one side in one case. x: place on the axis of a sweep."""

    case: str
    side: str
    metric: str
    unit: str
    better: Better
    samples: list[float]
    x: float | None = None


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much better ``side`` is than ``against`` (above 1:
    better), by the ratio of medians, with its interval.

    agreement: share of requests for which both generated the same token ids. calibration: speed of
    ``against`` here, as a share of its speed when it is driven its own documented way; None if that was not
    measured.
    """

    case: str
    metric: str
    side: str
    against: str
    ratio: float
    low: float
    high: float
    agreement: float | None = None
    calibration: float | None = None

    @property
    def holds(self) -> bool:
        """False for a peer that its own way makes faster: such a ratio says nothing about it."""
        return self.calibration is None or self.calibration >= 1 - TOLERANCE


def how_much_better(one: Measurement, other: Measurement) -> tuple[float, float, float]:
    """Ratio of the medians, above 1 if ``one`` is better, and its interval."""
    first, second = (one, other) if one.better == "higher" else (other, one)
    return ratio_interval(first.samples, second.samples)


def compared(
    ours: Mapping[str, Measurement],
    theirs: Mapping[str, Measurement],
    agreement: float | None = None,
    calibration: float | None = None,
) -> list[Comparison]:
    """Of every metric that both have and that can be better or worse."""
    found = []
    for metric, mine in ours.items():
        other = theirs.get(metric)
        if other is None or mine.better == "neither" or metric.startswith("errors"):
            continue
        if mine.samples and other.samples:
            ratio = how_much_better(mine, other)
            if all(map(math.isfinite, ratio)):
                found.append(
                    Comparison(mine.case, metric, mine.side, other.side, *ratio, agreement, calibration)
                )
    return found


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one benchmark command found, and what one must know to repeat it.

    commit: of the source tree, with "+" if it has changes; None outside of one.
    """

    schema_version: int
    kind: str
    created: str
    command: list[str]
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, str | None]
    configuration: dict[str, Any]
    measurements: list[Measurement]
    comparisons: list[Comparison] = []
    notes: list[str] = []


def make_report(
    kind: str,
    configuration: dict[str, Any],
    measurements: Sequence[Measurement],
    comparisons: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
) -> Report:
    """A report of now, here."""
    from minivllm.cli.machine.findings import collect

    found = collect()
    return Report(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=recorded_command(sys.argv[1:]),
        commit=source_commit(),
        machine={name: found[name] for name in _MACHINE} | {"threads": os.environ.get("OMP_NUM_THREADS")},
        versions={name: found["versions"][name] for name in _PACKAGES},
        configuration=configuration,
        measurements=list(measurements),
        comparisons=list(comparisons),
        notes=list(notes),
    )


def recorded_command(arguments: Sequence[str]) -> list[str]:
    """The command without what differs from machine to machine:
    where results go, and where other Pythons lie."""
    kept: list[str] = []
    for previous, argument in zip(["", *arguments], arguments):
        option, given, value = argument.partition("=")
        if option in _FILES or previous in _FILES:
            continue
        if previous == "--peer-python":
            argument = f"{option}=PYTHON"
        elif option == "--peer-python" and given:
            argument = f"{option}={value.partition('=')[0]}=PYTHON"
        kept.append(argument)
    return kept


def machine_text(report: Report) -> str:
    """Accelerators where there are any, else the processor,
    its cores and the instructions that decide its speed."""
    devices = [str(device["name"]) for device in report.machine.get("cuda_devices") or ()]
    if devices:
        return ", ".join(devices)
    cpu = report.machine["cpu"]
    flags = cpu["flags"] if any("bf16" in name for name in cpu["flags"]) else [*cpu["flags"], "no bfloat16"]
    return f"{cpu['usable_cores']} cores of {cpu['model']} ({', '.join(flags)})"


def source_commit() -> str | None:
    """Commit of the tree this package lies in; None if it was installed without one, or there is no git."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def read_report(path: Path) -> Report:
    """A report that ``--json`` wrote. Raises RequestError for anything else."""
    try:
        content = read_typed_file(path, MOST_REPORT_BYTES)
        schema = msgspec.json.decode(content, type=dict[str, Any]).get("schema_version")
        if schema != SCHEMA_VERSION:
            raise RequestError(
                f"{path} has schema version {schema!r}, but this version reads {SCHEMA_VERSION}."
            )
        return msgspec.json.decode(content, type=Report)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is not a report of minivllm bench: {error}.") from None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the figures go besides the terminal."""

    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this JSON file.")] = (
        None
    )
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table to this CSV file.")] = None
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")] = (
        None
    )
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw the figures into this PNG file.")] = (
        None
    )


def publish(report: Report, output: OutputOptions) -> None:
    """Print the table and write the files that were asked for. Raises ModelError if one cannot be written."""
    print_table(report)
    if output.json_file is not None:
        _write(output.json_file, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if output.csv_file is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows(report)])
        _write(output.csv_file, text.getvalue().encode())
    if output.markdown_file is not None:
        _write(output.markdown_file, markdown(report).encode())
    if output.png_file is not None:
        _write(output.png_file, draw(report))


HEADER = ["case", "metric", "engine", "n", "median", "p90", "p99", "ratio", "95 % interval", "same text"]


def rows(report: Report, everything: bool = True) -> list[list[str]]:
    """The report as a table of text under HEADER; a ratio above 1 means that the first engine is better.

    everything: also what is neither good nor bad, and that there were no errors.
    """
    by_key = {(one.case, one.metric, one.against): one for one in report.comparisons}
    table = []
    for one in report.measurements:
        if not everything and (
            one.better == "neither" or (one.metric.startswith("errors") and not any(one.samples))
        ):
            continue
        summary = summarize(one.samples)
        comparison = by_key.get((one.case, one.metric, one.side))
        compared = ["", "", ""]
        if comparison is not None:
            agreement = comparison.agreement
            compared = [
                f"{comparison.ratio:.2f} ×" if comparison.holds else "not calibrated",
                f"{comparison.low:.2f} – {comparison.high:.2f}" if comparison.holds else "",
                "" if agreement is None else f"{agreement:.0%}",
            ]
        percentiles = [figure_text(value, one.unit) for value in (summary.p50, summary.p90, summary.p99)]
        table.append([one.case, one.metric, one.side, str(summary.count), *percentiles, *compared])
    return table


def resources(report: Report) -> list[str]:
    """One line per side: the largest value of everything that is neither good nor bad."""
    largest: dict[str, dict[str, tuple[float, str]]] = {}
    for one in report.measurements:
        if one.better == "neither" and one.samples:
            own = largest.setdefault(one.side, {})
            value = max(one.samples)
            own[one.metric] = max((value, one.unit), own.get(one.metric, (value, one.unit)))
    return [
        f"{side}: "
        + ", ".join(f"{metric} {figure_text(value, unit)}" for metric, (value, unit) in own.items())
        for side, own in largest.items()
    ]


def figure_text(value: float | None, unit: str) -> str:
    """A value with its unit, as short as its size allows."""
    if value is None or math.isnan(value):
        return "n/a"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "ms":
        return f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"
    if unit == "count":
        return f"{value:,.0f}"
    if not unit:
        return f"{value:,.4g}"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _table(title: str, columns: Sequence[str], right: range) -> Table:
    """right: the columns of figures."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    return table


def _console() -> Console:
    """A pipe has no width: a table that is folded to eighty columns serves neither people nor programs."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def print_table(report: Report) -> None:
    several = len({one.side for one in report.measurements}) > 1
    keep = range(len(HEADER)) if several else range(len(HEADER) - 3)
    table = _table(report.kind, [HEADER[index] for index in keep], range(3, len(HEADER)))
    previous: list[str] = ["", ""]
    for row in rows(report, everything=False):
        shown = [
            "" if index < 2 and row[: index + 1] == previous[: index + 1] else row[index] for index in keep
        ]
        if previous[0] not in ("", row[0]):
            table.add_section()
        table.add_row(*shown)
        previous = row[:2]
    console = _console()
    console.print(table)
    for note in [*report.notes, *resources(report), machine_text(report)]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The table, the notes and what was measured, as Markdown."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    align = ["---"] * 3 + ["---:"] * (len(HEADER) - 3)
    table = [line(HEADER), line(align), *(line(row) for row in rows(report, everything=False))]
    where = f"{machine_text(report)}, torch {report.versions.get('torch')}, {report.created}"
    notes = [f"- {note}" for note in [*report.notes, *resources(report)]]
    parts = [*table, "", f"`minivllm {' '.join(report.command)}` on {where}."]
    return "\n".join([*parts, *(["", *notes] if notes else [])]) + "\n"


def draw(report: Report) -> bytes:
    """The report as a PNG: bars of medians, or lines where the cases are points of a sweep.

    A panel for every metric that can be better or worse. Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'minivllm[bench]', or leave it out.") from None
    shown = [one for one in report.measurements if one.better != "neither" and one.samples] or [
        one for one in report.measurements if one.samples
    ]
    metrics = list(dict.fromkeys((one.metric, one.unit, one.better) for one in shown))
    figure = Figure(figsize=(7, 2.6 * max(1, len(metrics))), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (metric, unit, better) in enumerate(metrics, 1):
        axes = figure.add_subplot(len(metrics), 1, place)
        own = [one for one in shown if one.metric == metric]
        if any(one.x is not None for one in own):
            _lines(axes, own)
            axes.set_ylabel(unit)
        else:
            _bars(axes, own)
            axes.set_xlabel(unit)
        axes.set_title(metric if better == "neither" else f"{metric} ({better} is better)", fontsize=9)
        axes.tick_params(labelsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _bars(axes: Any, measurements: list[Measurement]) -> None:
    sides = list(dict.fromkeys(one.side for one in measurements))
    cases = list(dict.fromkeys(one.case for one in measurements))
    height = 0.8 / len(sides)
    for number, side in enumerate(sides):
        own = [one for one in measurements if one.side == side]
        places = [cases.index(one.case) + (number - (len(sides) - 1) / 2) * height for one in own]
        axes.barh(places, [median(one.samples) for one in own], height=height * 0.9, label=side)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    if len(sides) > 1:
        axes.legend(fontsize=8)


def _lines(axes: Any, measurements: list[Measurement]) -> None:
    for side in dict.fromkeys(one.side for one in measurements):
        points = sorted(
            (one.x, median(one.samples)) for one in measurements if one.side == side and one.x is not None
        )
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=side)
    axes.legend(fontsize=8)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}.") from None


Key = tuple[str, str, str]
"""(case, metric, side)."""


@dataclass(frozen=True)
class Results:
    """Results in one file. setting: values that must be equal for a meaningful comparison."""

    series: dict[Key, Measurement]
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
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share by which a median may be worse before it is a regression."
        ),
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
    columns = ("case", "metric", "engine", "before", "after", "ratio", "95 % interval", "verdict")
    table = _table("ratio above 1: better", columns, range(3, 7))
    for one in found:
        case, metric, side = one.key
        values = figure_text(one.before, one.unit), figure_text(one.after, one.unit)
        table.add_row(
            case, metric, side, *values, f"{one.ratio:.2f} ×", f"{one.low:.2f} – {one.high:.2f}", one.verdict
        )
    console = _console()
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
    """Changes of all series that are in both files, in the order of the first."""
    found = []
    for key, before in old.series.items():
        after = new.series.get(key)
        if after is None or not before.samples or not after.samples:
            continue
        ratio, low, high = how_much_better(after, before)
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
    series = {(one.case, one.metric, one.side): one for one in report.measurements if one.better != "neither"}
    machine = {name: report.machine.get(name) for name in ("platform", "cpu", "cuda_devices", "threads")}
    return Results(series, {"the machine": machine, "the versions": report.versions})


def _of_pytest(path: Path, content: dict[str, Any]) -> Results:
    """pytest-benchmark keeps every round with --benchmark-json,
    and without them at least the median [seconds]."""
    series: dict[Key, Measurement] = {}
    try:
        for entry in content["benchmarks"]:
            stats = entry["stats"]
            samples = [1e3 * float(value) for value in stats.get("data") or [stats["median"]]]
            one = Measurement(str(entry["fullname"]), "pytest", "time", "ms", "lower", samples)
            series[one.case, one.metric, one.side] = one
    except (KeyError, TypeError, ValueError):
        raise RequestError(
            f"{path} looks like results of pytest-benchmark, but an entry has no times."
        ) from None
    cpu = (content.get("machine_info") or {}).get("cpu") or {}
    return Results(series, {"the machine": cpu.get("brand_raw")})
