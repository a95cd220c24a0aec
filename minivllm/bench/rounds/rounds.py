"""Runs cases on engines in turn: fresh processes, the same token ids, warm-up discarded, order alternating.

A peer is calibrated while it is measured: it runs the same requests its own documented way as well, and where
that is more than 5 % faster than the way it is driven here, there is no ratio.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from minivllm.bench.reports.figures import Figure, median, resource_figures
from minivllm.bench.reports.report import TOLERANCE, Comparison, Measurement, compared
from minivllm.bench.requests.workloads import Case
from minivllm.bench.rounds.side_processes import (
    Side,
    SideSpec,
    check_dtype,
    check_installed,
    complete,
    parse_peer_pythons,
    parse_sides,
)
from minivllm.bench.sides.drive import Answer, Room, Task


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that is measured, and the engines that it is compared with."""

    engine: Annotated[
        str,
        typer.Option(
            help="Engine to measure: minivllm, or minivllm,ARGUMENT=VALUE,… for other settings; with lora=N "
            "requests "
            "use N random adapters of ranks 8 to 64 in turn, with regex=PATTERN (a long "
            "one, such as [ -~]{999}) all answers match it."
        ),
    ] = "minivllm"
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Other engines, measured in turn: transformers, transformers-cb, llama.cpp, vllm, "
            "openvino (openvino,weights=int4, int8, fp16, bf16 or fp32), or "
            "minivllm,ARGUMENT=VALUE,… for other settings. Separated by commas, or repeated."
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Weights and activations of all engines.")] = "auto"
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            help="The Python that has an engine, if it is not this one. Repeatable.", metavar="ENGINE=PATH"
        ),
    ] = None

    def specs(self) -> list[SideSpec]:
        """The sides, all of them installed. Raises ConfigError."""
        specs = parse_sides([self.engine, *(self.vs or [])], parse_peer_pythons(self.peer_python or []))
        check_dtype(specs, self.dtype)
        for spec in specs:
            check_installed(spec)
        return specs

    def settings(self) -> dict[str, Any]:
        """For the report; of other Pythons, which engines have one."""
        return asdict(self) | {"peer_python": sorted(parse_peer_pythons(self.peer_python or []))}


@dataclass(frozen=True, kw_only=True)
class SideOptions(EngineOptions):
    """And how often."""

    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each case, after one warm-up.")] = 5
    calibrate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Repetitions in which other engines run each case their own documented way too: where that "
            "is more "
            "than 5 % faster, no ratio is shown.",
        ),
    ] = 3

    def measure(self, cases: Sequence[Case], model: str, specs: Sequence[SideSpec] | None = None) -> Outcome:
        """specs: in place of what the options name. Raises ConfigError or ModelError."""
        specs = self.specs() if specs is None else specs
        return measure_in_turn(
            specs, cases, model=model, dtype=self.dtype, repeats=self.repeats, calibrate=self.calibrate
        )


@dataclass(frozen=True)
class Outcome:
    """Results of all rounds. facts: of each side, about what it loaded.
    notes: how the peers are calibrated."""

    measurements: list[Measurement]
    comparisons: list[Comparison]
    facts: dict[str, dict[str, Any]]
    notes: list[str]


def common_room(cases: Sequence[Case]) -> Room:
    """Room for every case."""
    rooms = [case.room for case in cases]
    return Room(
        *(max(sizes) for sizes in zip(*((room.longest, room.running, room.tokens) for room in rooms)))
    )


def measure_in_turn(
    specs: Sequence[SideSpec],
    cases: Sequence[Case],
    *,
    model: str,
    dtype: str,
    repeats: int,
    calibrate: int = 0,
) -> Outcome:
    """Run every case ``repeats`` times on each side, and compare the first side with the others.

    The second half of the repetitions runs on new processes, which are started in the other order: of two
    equal engines the one that was started later has been seen 3 % faster for as long as it ran.
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
            _run_in_turn(completed if number == 0 else completed[::-1], cases, half, calibrate, say)
            for number, half in enumerate(halves)
        ]
    names = [spec.name for spec in specs]
    facts = {name: found[0][0][name] for name in names}
    outcome = Outcome([], [], facts, [])
    for index, case in enumerate(cases):
        turns = {name: [turn for _, results in found for turn in results[index][name]] for name in names}
        answered = {name: [turn.answer for turn in turns[name]] for name in names}
        own = {
            name: _measurements(
                case,
                name,
                [figure for turn in turns[name] for figure in turn.figures]
                + resource_figures(answered[name]),
            )
            for name in names
        }
        for name in names:
            outcome.measurements.extend(own[name].values())
        for name in names[1:]:
            calibration = None
            if "own_way" in facts[name]:
                calibration, note = _calibrated(turns[name], facts[name]["own_way"])
                outcome.notes.append(f"{name}, {case.name}: {note}")
            # Engines draw differently.
            same = None if case.sampling else agreement(answered[names[0]], answered[name])
            outcome.comparisons.extend(compared(own[names[0]], own[name], same, calibration))
    return outcome


@dataclass(frozen=True)
class _Turn:
    """One repetition of a case on one side. own_seconds: how long a peer took its own way."""

    figures: list[Figure]
    answer: Answer
    own_seconds: float | None


def _calibrated(turns: Sequence[_Turn], own_way: str) -> tuple[float | None, str]:
    """Speed of a peer here as a share of its own way's, and a sentence that says both."""
    pairs = [(turn.answer.seconds, turn.own_seconds) for turn in turns if turn.own_seconds is not None]
    if not pairs:
        return None, f"not calibrated against {own_way}: no --calibrate, or requests that differ."
    share, here, there = (
        median([b / a for a, b in pairs]),
        median([a for a, _ in pairs]),
        median([b for _, b in pairs]),
    )
    verdict = "" if share >= 1 - TOLERANCE else f" More than {TOLERANCE:.0%} below it, so there is no ratio."
    return share, f"{here:.3g} s here, {there:.3g} s by {own_way}: {share:.1%} of its own speed.{verdict}"


def _run_in_turn(
    specs: Sequence[SideSpec],
    cases: Sequence[Case],
    repetitions: Sequence[int],
    calibrate: int,
    say: Callable[..., None],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, list[_Turn]]]]:
    """Start the sides in this order and run the repetitions after a warm-up:
    facts by side, turns by case and side."""
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
                tasks = case.tasks(vocab_size, repetition)
                calibrates = 0 <= repetition < calibrate and _is_one_batch(tasks, case.room)
                # The order alternates, so that no engine always runs on the warmer or busier machine.
                for side in sides if repetition % 2 else reversed(sides):
                    say(f"{case.name}: {side.name}", advance=1)
                    ways = [False, True] if calibrates and "own_way" in side.facts else [False]
                    ran = {own: side.run(tasks, own) for own in (ways if repetition % 2 else ways[::-1])}
                    if repetition >= 0:
                        own_seconds = ran[True].seconds if True in ran else None
                        turns[side.name].append(
                            _Turn(case.figures(tasks, ran[False]), ran[False], own_seconds)
                        )
            results.append(turns)
        return {side.name: side.facts for side in sides}, results


def _is_one_batch(tasks: Sequence[Task], room: Room) -> bool:
    """Equal greedy requests that all run from the start: what every peer documents a way for."""
    shapes = {(len(task.prompt), task.max_tokens, task.arrival, task.after) for task in tasks}
    return (
        len(shapes) == 1
        and len(tasks) <= room.running
        and (tasks[0].arrival, tasks[0].after, tasks[0].sampling) == (0.0, None, {})
    )


def agreement(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float | None:
    """Share of requests that both answered with the same token ids;
    None if there are none that both answered."""
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
                case.name, side, figure.metric, figure.unit, figure.better, list(figure.samples), case.x
            )
    return merged
