"""What every chapter does: predict a number, measure it, draw a picture, set exercises.

A prediction that fails stops the chapter. Pictures are drawn in the terminal, and as PNG files with ``--save DIR``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

COLOURS = {
    "prompt": "#5fa8d3",
    "decode": "#f4a259",
    "wasted": "#e5383b",
    "cached": "#8cb369",
    "idle": "#d9d9d9",
    "other": "#b392c6",
}
"""What a coloured cell stands for, the same in all chapters; ``wasted`` is also a preemption."""

Cell = tuple[str, str]
"""A cell of a picture: its text, and what it stands for (a key of COLOURS, or "" for an empty place)."""

_BAR_WIDTH = 40
_MOST_ROWS = 16


class PredictionFailed(AssertionError):
    """What was measured is not what was predicted: the chapter, or the engine, is wrong."""


class Lesson:
    """One chapter on its way. ``doc``: the chapter's docstring, whose first line is its title."""

    def __init__(self, doc: str | None, arguments: Sequence[str] | None = None) -> None:
        assert doc is not None
        self.title = doc.strip().splitlines()[0]
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

    def heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def predict(self, what: str, value: Any, because: str) -> None:
        """Commit to a value before anything runs."""
        self._predictions[what] = value
        self.console.print(f"  predict   {what} = [bold]{_shown(value)}[/bold]  [dim]{because}[/dim]")

    def measure(self, what: str, value: Any, within: float = 0.0) -> None:
        """Compare with the prediction. within: allowed relative difference. Raises PredictionFailed."""
        predicted = self._predictions.pop(what)
        agrees = value == predicted if within == 0 else abs(value - predicted) <= within * abs(predicted)
        if not agrees:
            raise PredictionFailed(f"{what}: predicted {_shown(predicted)}, measured {_shown(value)}.")
        self.console.print(f"  measure   {what} = [bold]{_shown(value)}[/bold]  [green]as predicted[/green]")

    def check(self, holds: bool, claim: str) -> None:
        """A claim that is true or not. Raises PredictionFailed."""
        if not holds:
            raise PredictionFailed(f"This does not hold: {claim}.")
        self.console.print(f"  [green]holds[/green]     {claim}", highlight=False)

    # -- pictures ------------------------------------------------------------------------------------------------

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
            _save_cells(self._folder / f"{name}.png", title, rows, legend)

    def bars(self, name: str, title: str, values: Mapping[str, float], unit: str) -> None:
        """A picture of horizontal bars."""
        most = max(values.values()) or 1
        table = Table(title=escape(f"{title} [{unit}]"), title_justify="left", box=None, show_header=False)
        for label, value in values.items():
            table.add_row(label, Text("█" * round(_BAR_WIDTH * value / most), COLOURS["prompt"]), _shown(value))
        self.console.print(table)
        if self._folder is not None:
            figure, axes = _figure(7, 0.8 + 0.4 * len(values))
            axes.barh(list(values), list(values.values()), color=COLOURS["prompt"])
            axes.invert_yaxis()
            axes.set(title=title, xlabel=unit)
            _save(figure, self._folder / f"{name}.png")

    def curves(
        self, name: str, title: str, x: Sequence[float], series: Mapping[str, Sequence[float]], axes: str
    ) -> None:
        """A picture of curves over the same x. axes: "name of x, name of y". In the terminal, bars of some x."""
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
            for index, (label, values) in enumerate(series.items()):
                plot.plot(x, values, label=label, color=kinds[index % len(kinds)], marker="o", markersize=3)
            plot.set(title=title, xlabel=x_name, ylabel=y_name)
            plot.legend()
            _save(figure, self._folder / f"{name}.png")

    # -- exercises and the end -----------------------------------------------------------------------------------

    def exercise(self, text: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
        """Marks the function below as the solution of an exercise; it returns what it found out."""

        def register(solution: Callable[[], str]) -> Callable[[], str]:
            self._exercises.append((text, solution))
            return solution

        return register

    def passed(self, *claims: str) -> None:
        """The end: every prediction was measured, the exercises are shown, the solutions asked for are run."""
        if self._predictions:
            raise PredictionFailed(f"Predicted, but never measured: {', '.join(self._predictions)}.")
        numbers = [str(number) for number in range(1, len(self._exercises) + 1)]
        unknown = set(self._solutions) - {*numbers, "all"}
        if unknown:
            sys.exit(f"There is no exercise {', '.join(sorted(unknown))}: choose from {', '.join(numbers)} or all.")
        if self._exercises:
            self.heading("Exercises (solutions: --solution N)")
        for number, (text, _) in zip(numbers, self._exercises):
            self.console.print(f"  {number}. {text}", markup=False)
        for number, (text, solution) in zip(numbers, self._exercises):
            if number in self._solutions or "all" in self._solutions:
                print(f"\nExercise {number}: {text}\nSolution {number}: {solution()}", flush=True)
        print(f"\nPASS: {'; '.join(claims)}", flush=True)


def _parse(title: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write the pictures into DIR as PNG files")
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
            parser.error(f"--save: {options.save} cannot be written ({error.strerror}); name another directory.")
    return options


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


def _save_cells(path: Path, title: str, rows: Mapping[str, Sequence[Cell]], legend: Mapping[str, str]) -> None:
    figure, axes = _figure(min(24.0, 2.5 + 0.32 * max(map(len, rows.values()))), 1.2 + 0.34 * len(rows))
    from matplotlib.patches import Patch, Rectangle

    for y, cells in enumerate(rows.values()):
        for x, (text, kind) in enumerate(cells):
            if kind:
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[kind], edgecolor="white"))
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, max(map(len, rows.values()))), ylim=(len(rows), 0), title=title, xticks=[])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    patches = [Patch(color=COLOURS[kind], label=meaning) for kind, meaning in legend.items()]
    if patches:
        axes.legend(handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)
