"""Draws charts of speed and writes tables of it, from the reports that ``minivllm bench`` left.

Every ``.json`` file in ``tutorials/measurements`` is a report as ``minivllm bench … --json FILE`` writes it,
with the machine and the command it came from. ``minivllm/bench/README.md`` shows all reports of ``bench
model`` and
``bench accuracy``, and README.md shows one of them. To publish new figures, put the file there, then run
``python -m tutorials.speed_picture``: charts and documents follow. A peer that is more than 5 % faster when
it is run as its documentation says than in the comparison gets no ratio.

On a CPU three commands measure widely used engines,
each with a --peer-python for every engine that lives in another Python:

    cases="--case decode:1 --case decode:4 --case decode:16 --case decode:32:256 --case prefill:512"
    cases="$cases --repeats 5 --calibrate 2"
    minivllm bench model --dtype bfloat16 --vs transformers,vllm,openvino $cases \\
        --json tutorials/measurements/cpu_1_bfloat16.json
    minivllm bench model --dtype float32 --vs transformers,vllm,openvino $cases \\
        --json tutorials/measurements/cpu_2_float32.json
    minivllm bench model --engine minivllm,quantization=int4 --vs llama.cpp,openvino,weights=int4 $cases \\
        --json tutorials/measurements/cpu_3_int4.json

and a fourth one measures 16 requests that begin together and end together, prompts and answers in one figure:

    minivllm bench model --engine minivllm,quantization=int4 --dtype bfloat16 --vs minivllm \\
        --vs transformers,transformers-cb --case fixed:16:128:64 --repeats 5 --calibrate 1 \\
        --json tutorials/measurements/cpu_4_transformers.json

and a fifth one draws tokens, and measures requests whose prompts begin alike:

    minivllm bench model --dtype bfloat16 --vs vllm --case decode:16 \\
        --case decode:16,temperature=0.7,top_p=0.8,top_k=20,repetition_penalty=1.05 \\
        --case agents:8:4:200:40:32 --case system-prompt:8:500:40:32 --repeats 5 --calibrate 1 \\
        --json tutorials/measurements/cpu_6_requests.json
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Report, machine_text, read_report

FOLDER = Path(__file__).parent
MEASUREMENTS = FOLDER / "measurements"
PICTURE = FOLDER / "pictures" / "speed.svg"
PICTURE_OF_ALL = FOLDER / "pictures" / "speed_all.svg"
README = FOLDER.parent / "README.md"
BENCH = FOLDER.parent / "minivllm" / "bench" / "README.md"
SHOWN_FIRST = "cpu_1_bfloat16.json"
"""The report in README.md."""
BEGIN, END = "<!-- speed -->\n", "<!-- end of speed -->"
COLOURS = ("#f4a259", "#5fa8d3", "#8cb369", "#b392c6", "#d1788f", "#7a8aa0")


def reports(folder: Path = MEASUREMENTS, kind: str = "model") -> list[Report]:
    """All reports of one benchmark that are kept, in the order of their file names."""
    kept = [read_report(path) for path in sorted(folder.glob("*.json"))]
    return [report for report in kept if report.kind == kind]


def speeds(report: Report) -> dict[str, dict[str, float]]:
    """case -> side -> the median of its speed [tok/s], of a workload that of its output."""
    found: dict[str, dict[str, float]] = {}
    for one in report.measurements:
        if one.metric in ("speed", "output") and one.samples:
            found.setdefault(one.case, {})[one.side] = median(one.samples)
    return found


def section(report: Report) -> str:
    """One report as Markdown: machine, table of cases, command.
    The ratio is that of the first side to another one."""
    table = speeds(report)
    first, *others = _sides(report)
    refused = {(one.case, one.against) for one in report.comparisons if not one.holds}
    lines = [
        "| case | " + " | ".join([first, *(f"{side} | ratio" for side in others)]) + " |",
        "|---|" + "---:|" * (1 + 2 * len(others)),
    ]
    for case, row in table.items():
        cells = [_figure(row.get(first))]
        for side in others:
            ratio = f"{row[first] / row[side]:.2f} ×" if first in row and side in row else "n/a"
            ratio = "not calibrated" if (case, side) in refused else ratio
            cells += [_figure(row.get(side)), ratio]
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return _with_origin(lines, report)


def accuracy_section(report: Report) -> str:
    """A report of ``bench accuracy`` as Markdown: perplexity and error [nats] of every side."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in report.measurements:
        found.setdefault((one.case, one.side), {})[one.metric] = median(one.samples)
    lines = ["| text | engine | perplexity | error [nats] |", "|---|---|---:|---:|"]
    for (case, side), values in found.items():
        lines.append(f"| {case} | {side} | {values['perplexity']:.2f} | {values['error']:.3f} |")
    return _with_origin(lines, report)


def speed_part(kept: list[Report], picture: Path, document: Path) -> str:
    """The text between BEGIN and END of a document: the chart, and a section for each report."""
    sides = " and ".join(", ".join(_sides(report)) for report in kept)
    target = Path(os.path.relpath(picture, document.parent)).as_posix()
    return (
        f"\n![Bars of tokens per second: {sides}]({target})\n\n"
        + "\n".join(section(one) for one in kept)
        + "\n"
    )


def documents() -> dict[Path, str]:
    """Document -> its text, brought up to date with the reports that are kept."""
    readme = speed_part([read_report(MEASUREMENTS / SHOWN_FIRST)], PICTURE, README)
    bench = speed_part(reports(), PICTURE_OF_ALL, BENCH)
    bench += "".join(f"{accuracy_section(one)}\n" for one in reports(kind="accuracy"))
    parts = {README: readme, BENCH: bench}
    return {path: with_new_part(path.read_text(encoding="utf-8"), part) for path, part in parts.items()}


def with_new_part(text: str, part: str) -> str:
    """A document with the text between the marks replaced. Raises ValueError if the marks are missing."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + part + END + rest.split(END)[1]


def draw(kept: list[Report], path: Path) -> None:
    """A panel of bars for every report, as an SVG whose words are text."""
    import matplotlib
    from matplotlib.figure import Figure

    tables = [speeds(report) for report in kept]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minivllm", "font.size": 9}):
        heights = [0.6 + 0.17 * (1 + len(_sides(report))) * len(table) for report, table in zip(kept, tables)]
        figure = Figure(figsize=(9.5, 0.3 + sum(heights)), layout="constrained")
        panels = figure.subplots(len(tables), squeeze=False, height_ratios=heights)
        for report, table, axes in zip(kept, tables, panels[:, 0]):
            _bars(axes, table, _sides(report))
            axes.set_title(machine_text(report), fontsize=9, loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Any, table: dict[str, dict[str, float]], sides: list[str]) -> None:
    height = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places = [
            place - 0.4 + (number + 0.5) * height for place, row in enumerate(table.values()) if side in row
        ]
        values = [row[side] for row in table.values() if side in row]
        bars = axes.barh(places, values, height * 0.9, label=side, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, [_figure(value) for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(table)), list(table))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _sides(report: Report) -> list[str]:
    return list(dict.fromkeys(side for row in speeds(report).values() for side in row))


def _figure(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.3g} tok/s" if value < 1000 else f"{value:,.0f} tok/s"


def _with_origin(table: list[str], report: Report) -> str:
    """A table after the machine and the versions of torch and of every peer, and before the command."""
    sides = report.configuration["sides"]
    peers = [f"{name} {facts['version']}" for name, facts in sides.items() if "version" in facts]
    versions = ", ".join([f"torch {report.versions['torch']}", *peers])
    command = f"Command: `minivllm {shlex.join(report.command)}`"
    return "\n".join([f"On {machine_text(report)}, with {versions}:", "", *table, "", command]) + "\n"


def main() -> int:
    """Bring charts and documents up to date."""
    kept = reports()
    if not kept:
        print(
            f"There is no report in {MEASUREMENTS}: minivllm bench model --json FILE writes one.",
            file=sys.stderr,
        )
        return 1
    draw([read_report(MEASUREMENTS / SHOWN_FIRST)], PICTURE)
    draw(kept, PICTURE_OF_ALL)
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
    print(f"{PICTURE_OF_ALL.name} and {BENCH.relative_to(FOLDER.parent)} show {len(kept)} reports.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
