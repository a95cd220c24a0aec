"""Draws the README's chart of speeds and writes its tables, from the reports that ``minivllm bench`` left.

Every ``.json`` file in ``tutorials/measurements`` is a report as ``minivllm bench model --json FILE`` writes it, with
the machine and the command it came from. To publish new figures, put the file there, then run
``python -m tutorials.speed_picture``: chart and README follow.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from minivllm.cli.bench.report import Report, read_report
from minivllm.cli.bench.statistics import median

FOLDER = Path(__file__).parent
MEASUREMENTS = FOLDER / "measurements"
PICTURE = FOLDER / "pictures" / "speed.svg"
README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- speed -->\n", "<!-- end of speed -->"
PACKAGES = ("torch", "transformers", "llama-cpp-python", "vllm")
COLOURS = ("#f4a259", "#5fa8d3", "#8cb369", "#b392c6")


def reports(folder: Path = MEASUREMENTS) -> list[Report]:
    """All reports that are kept, in the order of their file names."""
    return [read_report(path) for path in sorted(folder.glob("*.json"))]


def speeds(report: Report) -> dict[str, dict[str, float]]:
    """case -> side -> the median of its speed [tok/s]."""
    found: dict[str, dict[str, float]] = {}
    for one in report.measurements:
        if one.metric == "speed" and one.samples:
            found.setdefault(one.case, {})[one.side] = median(one.samples)
    return found


def section(report: Report) -> str:
    """One report as Markdown: what ran where, and a table of cases. The ratio is first side to each other one."""
    table = speeds(report)
    first, *others = dict.fromkeys(side for row in table.values() for side in row)
    lines = [
        f"`minivllm {shlex.join(report.command)}` on {_machine(report)}, with {_versions(report)}:",
        "",
        "| case | " + " | ".join([first, *(f"{side} | ratio" for side in others)]) + " |",
        "|---|" + "---:|" * (1 + 2 * len(others)),
    ]
    for case, row in table.items():
        cells = [_figure(row.get(first))]
        for side in others:
            ratio = f"{row[first] / row[side]:.2f} ×" if first in row and side in row else "n/a"
            cells += [_figure(row.get(side)), ratio]
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return "\n".join(lines) + "\n"


def readme_part(kept: list[Report]) -> str:
    """What stands between BEGIN and END: the chart, and a section for each report."""
    picture = PICTURE.relative_to(README.parent).as_posix()
    sides = " and ".join(", ".join(_sides(report)) for report in kept)
    return f"\n![Bars of tokens per second: {sides}]({picture})\n\n" + "\n".join(section(one) for one in kept) + "\n"


def with_new_part(readme: str, kept: list[Report]) -> str:
    """The README with what stands between the marks replaced. Raises ValueError if the marks are missing."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + readme_part(kept) + END + rest.split(END)[1]


def draw(kept: list[Report], path: Path) -> None:
    """A panel of bars for every report, as an SVG whose words are text."""
    import matplotlib
    from matplotlib.figure import Figure

    tables = [speeds(report) for report in kept]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minivllm", "font.size": 9}):
        figure = Figure(figsize=(9.5, 0.6 + sum(0.5 + 0.5 * len(table) for table in tables)), layout="constrained")
        panels = figure.subplots(len(tables), squeeze=False, height_ratios=[1 + len(table) for table in tables])
        for report, table, axes in zip(kept, tables, panels[:, 0]):
            _bars(axes, table, _sides(report))
            axes.set_title(f"minivllm {shlex.join(report.command)}", fontsize=9, loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Any, table: dict[str, dict[str, float]], sides: list[str]) -> None:
    height = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places = [place - 0.4 + (number + 0.5) * height for place, row in enumerate(table.values()) if side in row]
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


def _machine(report: Report) -> str:
    """Accelerators where there are any, else the processor, its cores and the instructions that decide its speed."""
    devices = [str(device["name"]) for device in report.machine.get("cuda_devices") or ()]
    if devices:
        return ", ".join(devices)
    cpu = report.machine["cpu"]
    flags = [name for name in cpu["flags"] if name in ("amx_bf16", "avx512_bf16")] or cpu["flags"][-1:]
    return f"{cpu['usable_cores']} cores of {cpu['model']} ({', '.join(flags)})"


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {report.versions[name]}" for name in PACKAGES if report.versions.get(name))


def main() -> int:
    """Bring picture and README up to date."""
    kept = reports()
    if not kept:
        print(f"There is no report in {MEASUREMENTS}: minivllm bench model --json FILE writes one.", file=sys.stderr)
        return 1
    draw(kept, PICTURE)
    README.write_text(with_new_part(README.read_text(encoding="utf-8"), kept), encoding="utf-8")
    print(f"{PICTURE.name} and README.md show {len(kept)} reports.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
