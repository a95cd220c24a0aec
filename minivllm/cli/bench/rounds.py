"""Runs cases on engines in turn: fresh processes, the same token ids, warm-up discarded, order alternating."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from minivllm.cli.bench.cases import Case
from minivllm.cli.bench.figures import Figure, resource_figures
from minivllm.cli.bench.report import Comparison, Measurement
from minivllm.cli.bench.sides import Answer, Room, Side, SideSpec, check_installed, complete, parse_sides
from minivllm.cli.bench.statistics import ratio_interval


@dataclass(frozen=True, kw_only=True)
class SideOptions:
    """What is measured, and against whom."""

    engine: Annotated[
        str,
        typer.Option(
            help="What is measured: minivllm, or minivllm,ARGUMENT=VALUE,… for other settings; with lora=N requests "
            "use N random adapters of ranks 8 to 64 in turn, with regex=PATTERN (a long "
            "one, such as [ -~]{999}) all answers match it."
        ),
    ] = "minivllm"
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Other engines, measured in turn: transformers, transformers-cb, llama.cpp, vllm, or "
            "minivllm,ARGUMENT=VALUE,… for other settings. Separated by commas, or repeated."
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Weights and activations of all engines.")] = "auto"
    llama_cpp_python: Annotated[
        str | None, typer.Option(help="The Python that has llama_cpp, if it is not this one.", metavar="PATH")
    ] = None
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each case, after one warm-up.")] = 5

    def specs(self) -> list[SideSpec]:
        """The sides, all of them installed. Raises ConfigError."""
        specs = parse_sides([self.engine, *(self.vs or [])], self.llama_cpp_python)
        for spec in specs:
            check_installed(spec)
        return specs


@dataclass(frozen=True)
class Outcome:
    """What came out of all rounds. facts: what each side says it loaded."""

    measurements: list[Measurement]
    comparisons: list[Comparison]
    facts: dict[str, dict[str, Any]]


def common_room(cases: Sequence[Case]) -> Room:
    """Room for every case."""
    rooms = [case.room for case in cases]
    return Room(*(max(sizes) for sizes in zip(*((room.longest, room.running, room.tokens) for room in rooms))))


def measure_in_turn(
    specs: Sequence[SideSpec], cases: Sequence[Case], *, model: str, dtype: str, repeats: int
) -> Outcome:
    """Run every case ``repeats`` times on each side, and compare the first side with the others.

    The second half of the repetitions runs on new processes, which are started in the other order: of two equal engines
    the one that was started later has been seen 3 % faster for as long as it ran.
    Raises ConfigError or ModelError if a side cannot be started or dies.
    """
    from rich.console import Console
    from rich.progress import Progress

    room = common_room(cases)
    completed = [complete(spec, model, dtype, room) for spec in specs]
    middle = (repeats + 1) // 2 if len(specs) > 1 else repeats
    halves = [half for half in (range(middle), range(middle, repeats)) if half]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=len(cases) * (repeats + len(halves)) * len(specs))

        def say(what: str, advance: int = 0) -> None:
            progress.update(bar, description=what, advance=advance)

        found = [
            _run_in_turn(completed if number == 0 else completed[::-1], cases, half, say)
            for number, half in enumerate(halves)
        ]
    names = [spec.name for spec in specs]
    measurements: list[Measurement] = []
    comparisons: list[Comparison] = []
    for index, case in enumerate(cases):
        turns = {name: [turn for _, results in found for turn in results[index][name]] for name in names}
        answered = {name: [answer for turn in turns[name] for answer in turn.answers] for name in names}
        own = {
            name: _measurements(
                case,
                name,
                [figure for turn in turns[name] for figure in turn.figures] + resource_figures(answered[name]),
            )
            for name in names
        }
        for name in names:
            measurements += own[name].values()
        for name in names[1:]:
            comparisons += _comparisons(own[names[0]], own[name], agreement(answered[names[0]], answered[name]))
    facts = found[0][0]
    return Outcome(measurements, comparisons, {name: facts[name] for name in names})


@dataclass(frozen=True)
class _Turn:
    """One repetition of a case on one side."""

    figures: list[Figure]
    answers: list[Answer]


def _run_in_turn(
    specs: Sequence[SideSpec], cases: Sequence[Case], repetitions: Sequence[int], say: Callable[..., None]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, list[_Turn]]]]:
    """Start the sides in this order and run the repetitions after a warm-up: facts by side, turns by case and side."""
    with contextlib.ExitStack() as stack:
        sides: list[Side] = []
        for spec in specs:
            say(f"starting {spec.name}")
            sides.append(stack.enter_context(Side(spec)))
        vocab_size = min(side.facts["vocab_size"] for side in sides)
        results = []
        for case in cases:
            turns: dict[str, list[_Turn]] = {side.name: [] for side in sides}
            for repetition in (-1, *repetitions):
                runs = case.runs(vocab_size, repetition)
                # The order alternates, so that no engine always runs on the warmer or busier machine.
                for side in sides if repetition % 2 else reversed(sides):
                    say(f"{case.name}: {side.name}", advance=1)
                    answers = [side.run(tasks) for tasks in runs]
                    if repetition >= 0:
                        turns[side.name].append(_Turn(list(case.figures(runs, answers)), answers))
            results.append(turns)
        return {side.name: side.facts for side in sides}, results


def agreement(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float | None:
    """Share of requests that both answered with the same token ids; None if there are none that both answered."""
    same = [
        mine.token_ids == other.token_ids
        for one, another in zip(ours, theirs)
        for mine, other in zip(one.records, another.records)
        if mine.error is None and other.error is None
    ]
    return sum(same) / len(same) if same else None


def _measurements(case: Case, side: str, figures: Sequence[Figure]) -> dict[str, Measurement]:
    """Samples of all repetitions, by metric."""
    merged: dict[str, Measurement] = {}
    for figure in figures:
        if figure.metric in merged:
            merged[figure.metric].samples.extend(figure.samples)
        else:
            merged[figure.metric] = Measurement(
                case=case.name,
                side=side,
                metric=figure.metric,
                unit=figure.unit,
                better=figure.better,
                samples=list(figure.samples),
                x=case.x,
            )
    return merged


def _comparisons(ours: dict[str, Measurement], theirs: dict[str, Measurement], same: float | None) -> list[Comparison]:
    found = []
    for metric, mine in ours.items():
        other = theirs.get(metric)
        if mine.better == "neither" or metric.startswith("errors") or other is None:
            continue
        if mine.samples and other.samples:
            better, worse = (mine, other) if mine.better == "higher" else (other, mine)
            ratio, low, high = ratio_interval(better.samples, worse.samples)
            if not all(map(math.isfinite, (ratio, low, high))):
                continue
            found.append(
                Comparison(
                    case=mine.case,
                    metric=metric,
                    side=mine.side,
                    against=other.side,
                    ratio=ratio,
                    low=low,
                    high=high,
                    agreement=same,
                )
            )
    return found
