"""``python -m tutorials`` lists the chapters, ``--run 3 7`` prints some of them,
``--run`` checks them all."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Chapter:
    """A script of this folder. number: "01" to "26", or "A" and up for the worked examples after them."""

    number: str
    path: Path
    summary: str

    @property
    def module(self) -> str:
        return f"tutorials.{self.path.stem}"


def chapters() -> list[Chapter]:
    """All chapters in their order, by the first lines of their docstrings: ``01 · The naive loop: …``."""
    found = []
    for path in sorted(FOLDER.glob("[te][0-9][0-9]_*.py"), key=lambda path: (path.stem[0] == "e", path.stem)):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert doc is not None, f"{path.name} has no docstring"
        number, _, summary = " ".join(doc.partition("\n\n")[0].split()).partition(" · ")
        found.append(Chapter(number, path, summary))
    return found


def list_chapters(console: Console) -> None:
    table = Table(
        title="Tutorials: a serving engine, taken apart", title_justify="left", box=None, header_style="dim"
    )
    table.add_column("chapter", justify="right")
    table.add_column("what it shows")
    for chapter in chapters():
        table.add_row(chapter.number, f"{escape(chapter.summary)}\n[dim]python -m {chapter.module}[/dim]")
    console.print(table)
    console.print(
        "\nRead some: python -m tutorials --run 1 5     Check all: --run     Pictures: --save DIR",
        highlight=False,
    )


def command(chapter: Chapter, save: Path | None) -> list[str]:
    return [sys.executable, "-m", chapter.module, *(["--save", str(save.resolve())] if save else [])]


def print_chapters(wanted: list[Chapter], save: Path | None) -> int:
    """Run them one after the other, each in a process of its own that prints here.
    Returns how many failed."""
    return sum(
        subprocess.run(command(chapter, save), cwd=FOLDER.parent).returncode != 0 for chapter in wanted
    )


def check_chapters(console: Console, wanted: list[Chapter], save: Path | None) -> int:
    """Run each in a process of its own and show a line of what it proved. Returns how many failed."""
    state = {chapter.number: ["[dim]waiting[/dim]", "", ""] for chapter in wanted}
    failures: dict[str, str] = {}

    def table() -> Table:
        shown = Table(box=None, header_style="dim")
        for column in ("chapter", "", "seconds", "what was shown"):
            shown.add_column(column)
        for chapter in wanted:
            shown.add_row(chapter.number, *state[chapter.number])
        return shown

    with Live(table(), console=console, refresh_per_second=4) as live:
        for chapter in wanted:
            state[chapter.number][0] = "[yellow]running[/yellow]"
            live.update(table())
            started = time.perf_counter()
            result = subprocess.run(
                command(chapter, save),
                capture_output=True,
                text=True,
                encoding="utf-8",
                cwd=FOLDER.parent,
                env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            )
            seconds = f"{time.perf_counter() - started:.1f}"
            last = (result.stdout.strip().splitlines() or [""])[-1]
            if result.returncode == 0 and last.startswith("PASS: "):
                state[chapter.number] = [
                    "[green]passed[/green]",
                    seconds,
                    escape(last.removeprefix("PASS: ")),
                ]
            else:
                failures[chapter.number] = result.stderr or result.stdout
                state[chapter.number] = ["[red]FAILED[/red]", seconds, "see below"]
            live.update(table())
    for number, output in failures.items():
        console.print(f"\n[red]Chapter {number}[/red]\n{escape(output.strip())}", highlight=False)
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tutorials", description="Lists the chapters, or runs them."
    )
    parser.add_argument(
        "--run", nargs="*", metavar="N", help="print these chapters; without numbers, check all"
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="with --run: write the pictures into DIR as PNG files"
    )
    options = parser.parse_args()
    console = Console()
    if options.run is None:
        list_chapters(console)
        return 0
    known = {chapter.number.lstrip("0"): chapter for chapter in chapters()}
    numbers = [number.upper().lstrip("0") for number in options.run] or list(known)
    unknown = [number for number in numbers if number not in known]
    if unknown:
        parser.error(f"There is no chapter {', '.join(unknown)}; choose from {', '.join(known)}.")
    wanted = [known[number] for number in numbers]
    failed = (
        print_chapters(wanted, options.save) if options.run else check_chapters(console, wanted, options.save)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
