"""What every chapter does: tell its prose, predict a number, measure it, draw a picture, set exercises.

The prose of a chapter are its docstring and its ``# %% [markdown]`` cells. Each is printed before the output
of the code below it. A prediction that fails stops the chapter. Pictures are drawn in the terminal, and as
PNG files with ``--save DIR``.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table
from rich.text import Text

COLOURS = {
    "prompt": "#5fa8d3",
    "decode": "#f4a259",
    "wasted": "#ef6f6c",
    "preempted": "#ef6f6c",
    "cached": "#8cb369",
    "idle": "#d9d9d9",
    "other": "#b392c6",
}
"""What a coloured cell stands for, the same in all chapters. Black text is readable on each."""

LINES = {"#1f6f97": "o", "#c2500b": "s", "#4d7c0f": "^", "#7e4fa3": "D"}
"""Colours of curves and their marks: dark enough for a white ground, and told apart without colour."""

Cell = tuple[str, str]
"""A cell of a picture: its text, and what it stands for (a key of COLOURS, or "" for an empty place)."""

_BAR_WIDTH = 40
_PROSE_WIDTH = 100
_MOST_ROWS = 16


class PredictionFailed(AssertionError):
    """What was measured is not what was predicted: the chapter, or the engine, is wrong."""


class Lesson:
    """One chapter on its way. ``doc``: the chapter's docstring, whose first paragraph is its title."""

    def __init__(self, doc: str | None, arguments: Sequence[str] | None = None) -> None:
        assert doc is not None
        self.title = " ".join(doc.strip().partition("\n\n")[0].split())
        options = _parse(self.title, arguments)
        # The chapters' models have no tokenizer on purpose, and the engine need not say so every time.
        logging.getLogger("minivllm.frontend").setLevel(logging.ERROR)
        self._folder: Path | None = options.save
        self._solutions: list[str] = options.solution
        self._predictions: dict[str, Any] = {}
        self._exercises: list[tuple[str, Callable[[], str]]] = []
        # Who asked for a solution has read the chapter; it still runs, since solutions build on it.
        self.console = Console(highlight=False, quiet=bool(self._solutions))
        name, _, idea = self.title.partition(": ")
        self.console.rule(Text(name, style="bold"))
        self.console.print(idea, style="italic", markup=False)
        # The caller is the chapter; a notebook or a test that has no file shows no prose.
        self._file = sys._getframe(1).f_code.co_filename
        self._prose = _prose_cells(Path(self._file)) if Path(self._file).is_file() else []
        if self._prose:
            self._print_prose(doc.strip().partition("\n\n")[2])
        self._tell()

    def _tell(self) -> None:
        """Print the prose above the line of the chapter that is running now."""
        line, frame = 0, sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        while self._prose and self._prose[0][0] < line:
            self._print_prose(self._prose.pop(0)[1])

    def _print_prose(self, text: str) -> None:
        width = min(self.console.width, _PROSE_WIDTH)
        for paragraph in re.split(r"^(## .+)$", text, flags=re.MULTILINE):
            if paragraph.startswith("## "):
                self.console.print(Text(f"\n{paragraph[3:]}", style="bold underline"))
            elif paragraph.strip():
                self.console.print()
                self.console.print(Markdown(paragraph), width=width)

    def heading(self, text: str) -> None:
        self._tell()
        self.console.print(f"\n[bold]{escape(text)}[/bold]")

    def say(self, text: str) -> None:
        self._tell()
        self.console.print(text, markup=False)

    def predict(self, what: str, value: Any, because: str) -> None:
        """Commit to a value before anything runs."""
        self._tell()
        self._predictions[what] = value
        self.console.print(f"  predict   {what} = [bold]{_shown(value)}[/bold]  [dim]{because}[/dim]")

    def measure(self, what: str, value: Any, within: float = 0.0) -> None:
        """Compare with the prediction. within: allowed relative difference. Raises PredictionFailed."""
        self._tell()
        predicted = self._predictions.pop(what)
        agrees = value == predicted if within == 0 else abs(value - predicted) <= within * abs(predicted)
        if not agrees:
            raise PredictionFailed(f"{what}: predicted {_shown(predicted)}, measured {_shown(value)}.")
        self.console.print(f"  measure   {what} = [bold]{_shown(value)}[/bold]  [green]as predicted[/green]")

    def check(self, holds: bool, claim: str) -> None:
        """A claim that is true or not. Raises PredictionFailed."""
        self._tell()
        if not holds:
            raise PredictionFailed(f"This does not hold: {claim}.")
        self.console.print(f"  [green]holds[/green]     {claim}", highlight=False)

    # -- pictures ----------------------------------------------------------------------------------

    def cells(
        self,
        name: str,
        title: str,
        rows: Mapping[str, Sequence[Cell]],
        legend: Mapping[str, str] | None = None,
        narrow: bool = False,
    ) -> None:
        """A picture of coloured cells, a labelled row each.

        name: of the PNG file. legend: what the colours mean here, if not what their names say; {} draws none.
        narrow: no space between cells.
        """
        self._tell()
        width = (not narrow) + max((len(text) for cells in rows.values() for text, _ in cells), default=1)
        label_width = 1 + max(map(len, rows))
        picture = Text(f"\n{title}\n", style="italic")
        picture = Text().append_text(picture)
        legend = _legend(rows) if legend is None else legend
        for label, cells in rows.items():
            picture.append(label.ljust(label_width))
            for text, kind in cells:
                style = f"black on {COLOURS[kind]}" if kind else "dim"
                picture.append((text or ("" if kind else "·")).rjust(width), style)
            picture.append("\n")
        if legend:
            picture.append(" " * label_width)
        for kind, meaning in legend.items():
            picture.append(f" {meaning} ", f"black on {COLOURS[kind]}").append(" ")
        self.console.print(picture, no_wrap=True, crop=False, overflow="ignore")
        if self._folder is not None:
            _save_cells(self._folder / f"{name}.png", title, rows, legend, narrow)

    def bars(self, name: str, title: str, values: Mapping[str, float], unit: str) -> None:
        """A picture of horizontal bars."""
        self._tell()
        most = max(values.values()) or 1
        table = Table(title=escape(f"{title} [{unit}]"), title_justify="left", box=None, show_header=False)
        for label, value in values.items():
            table.add_row(
                label, Text("█" * round(_BAR_WIDTH * value / most), COLOURS["prompt"]), _shown(value)
            )
        self.console.print(table)
        if self._folder is not None:
            figure, axes = _figure(7, 0.8 + 0.4 * len(values))
            drawn = axes.barh(list(values), list(values.values()), color=COLOURS["prompt"])
            axes.bar_label(drawn, [_shown(value) for value in values.values()], padding=4)
            axes.margins(x=0.12)
            axes.invert_yaxis()
            axes.set(title=title, xlabel=unit)
            _save(figure, self._folder / f"{name}.png")

    def curves(
        self,
        name: str,
        title: str,
        x: Sequence[float],
        series: Mapping[str, Sequence[float]],
        axes: str,
        log: bool = False,
    ) -> None:
        """A picture of curves over the same x. axes: "name of x, name of y". In the terminal, bars of some x.

        log: both axes of the PNG are logarithmic, for x that double from place to place.
        """
        self._tell()
        x_name, y_name = axes.split(", ", 1)
        most = max(max(values) for values in series.values()) or 1
        table = Table(title=escape(f"{title}: {y_name}"), title_justify="left", box=None, header_style="dim")
        table.add_column(x_name, justify="right")
        width = max(8, 60 // len(series) - 10)
        for label in series:
            table.add_column(label)
        places = range(0, len(x), -(-len(x) // _MOST_ROWS))
        kinds = list(COLOURS.values())
        for place in places:
            row = [Text(_shown(x[place]))]
            for index, values in enumerate(series.values()):
                bar = Text("█" * round(width * values[place] / most), kinds[index % len(kinds)])
                row.append(bar.append(" " + _shown(values[place]), "default"))
            table.add_row(*row)
        self.console.print(table)
        if self._folder is not None:
            figure, plot = _figure(7, 4)
            for (label, values), (colour, mark) in zip(series.items(), LINES.items()):
                plot.plot(x, values, label=label, color=colour, marker=mark, markersize=5, linewidth=2)
            plot.set(title=title, xlabel=x_name, ylabel=y_name)
            plot.grid(alpha=0.3)
            if log:
                plot.set(xscale="log", yscale="log")
            for axis in (plot.xaxis, plot.yaxis):
                axis.set_major_formatter(lambda value, _: f"{value:,g}")
            if log or len(x) <= _MOST_ROWS // 2:  # every place has its own mark below the axis
                plot.set_xticks(list(x))
                plot.set_xticks([], minor=True)
            plot.legend()
            _save(figure, self._folder / f"{name}.png")

    # -- exercises and the end ---------------------------------------------------------------------

    def exercise(self, text: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
        """Marks the function below as the solution of an exercise; it returns what it found out."""

        def register(solution: Callable[[], str]) -> Callable[[], str]:
            self._exercises.append((text, solution))
            return solution

        return register

    def passed(self, *claims: str) -> None:
        """The end: every prediction was measured, the exercises are shown,
        the solutions asked for are run."""
        if self._predictions:
            raise PredictionFailed(f"Predicted, but never measured: {', '.join(self._predictions)}.")
        numbers = [str(number) for number in range(1, len(self._exercises) + 1)]
        unknown = set(self._solutions) - {*numbers, "all"}
        if unknown:
            sys.exit(
                f"There is no exercise {', '.join(sorted(unknown))}: choose from {', '.join(numbers)} or all."
            )
        self._tell()
        for number, (text, _) in zip(numbers, self._exercises):
            self.console.print(f"  {number}. {text}  (solution: --solution {number})", markup=False)
        for number, (text, solution) in zip(numbers, self._exercises):
            if number in self._solutions or "all" in self._solutions:
                print(f"\nExercise {number}: {text}\nSolution {number}: {solution()}", flush=True)
        print(f"\nPASS: {'; '.join(claims)}", flush=True)


def _parse(title: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="also write the pictures into DIR as PNG files"
    )
    parser.add_argument(
        "--solution", nargs="+", default=[], metavar="N", help="run the solutions of these exercises, or all"
    )
    if "ipykernel" in sys.modules:  # a notebook's command line is not ours
        arguments = []
    options = parser.parse_args(arguments)
    if options.save is not None:
        try:
            options.save.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.save).close()
        except OSError as error:
            parser.error(
                f"--save: {options.save} cannot be written ({error.strerror}); name another directory."
            )
    return options


def _prose_cells(path: Path) -> list[tuple[int, str]]:
    """(number of its first line, text) of every ``# %% [markdown]`` cell of a chapter."""
    found: list[tuple[int, list[str]]] = []
    is_prose = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("# %%"):
            is_prose = line.startswith("# %% [markdown]")
            if is_prose:
                found.append((number, []))
        elif is_prose and line.startswith("#"):
            found[-1][1].append(line[2:])
    return [(number, "\n".join(lines)) for number, lines in found]


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--save needs matplotlib: pip install matplotlib.")
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)


def _legend(rows: Mapping[str, Sequence[Cell]]) -> dict[str, str]:
    """The kinds that occur, under their own names, in the order of COLOURS."""
    used = {kind for cells in rows.values() for _, kind in cells}
    return {kind: kind for kind in COLOURS if kind in used}


def _save_cells(
    path: Path, title: str, rows: Mapping[str, Sequence[Cell]], legend: Mapping[str, str], narrow: bool
) -> None:
    columns, most = (
        max(map(len, rows.values())),
        max(len(text) for cells in rows.values() for text, _ in cells),
    )
    cell = (
        0.16 if narrow else max(0.3, 0.14 + 0.085 * most)
    )  # inches; a picture of 70 narrow cells fits a page
    figure, axes = _figure(
        max(6.0, 0.4 + 0.09 * max(map(len, rows)) + cell * columns), 1.3 + 0.34 * len(rows)
    )
    from matplotlib.patches import Patch, Rectangle

    for y, cells in enumerate(rows.values()):
        for x, (text, kind) in enumerate(cells):
            if kind:
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[kind], edgecolor="white"))
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8 if narrow else 9)
    axes.set(xlim=(0, max(map(len, rows.values()))), ylim=(len(rows), 0), title=title, xticks=[])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    patches = [Patch(color=COLOURS[kind], label=meaning) for kind, meaning in legend.items()]
    if patches:
        figure.legend(
            handles=patches, fontsize=10, loc="outside lower center", ncols=len(patches), frameon=False
        )
    _save(figure, path)
