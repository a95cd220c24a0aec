"""``minivllm bench images``: a second question about an image, and text that decodes beside new images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm.bench.images.random_model import write_random_model
from minivllm.bench.images.workloads import PROMPT_TOKENS, Asked, SeeingEngine
from minivllm.bench.reports.figures import median, percentile
from minivllm.bench.reports.report import (
    Comparison,
    Measurement,
    OutputOptions,
    compared,
    make_report,
    publish,
)
from minivllm.bench.rounds.side_processes import parse_sides, steady_pool
from minivllm.bench.sides.drive import Room
from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs, ImagesConfig
from minivllm.errors import ConfigError

AGAIN = "the same image again"
FIRST, SECOND = "first question", "second question"
ALONE, BESIDE = "text alone", "beside images"
WHOLE = "whole images"
GAP = "gap between tokens"
RANDOM = "Random weights in the sizes of SmolVLM-256M: times and counts mean something, answers do not."
_SET_HERE = {"model": "--model", "max_num_batched_encoder_embeds": "--units"}
"""Engine argument -> the option that takes its place."""
_CACHE_SIZES = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")


@with_options
def images(
    output: OutputOptions,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A model that sees. Left out: random weights in the sizes of SmolVLM-256M.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Engine arguments, as in minivllm,dtype=float32,block_size=32.")
    ] = "minivllm",
    width: Annotated[int, typer.Option(min=1, help="Width of the pictures [pixels].")] = 1024,
    height: Annotated[int, typer.Option(min=1, help="Height of the pictures [pixels].")] = 256,
    units: Annotated[int, typer.Option(min=1, help="Units of images that a step encodes, where few.")] = 1,
    streams: Annotated[int, typer.Option(min=1, help="Text requests that decode together.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that each of them decodes.")] = 192,
    arrivals: Annotated[int, typer.Option(min=1, help="Images that arrive meanwhile.")] = 3,
    pause: Annotated[int, typer.Option(min=0, help="Steps from an answer to the next image.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, after one warm-up.")] = 2,
) -> None:
    """Measure a second question about an image, and text that decodes beside new images.

    The images are encoded all units in a step, and a few units a step. Text alone is measured in the same
    rounds. Frontend and engine are in this process.

    Example: minivllm bench images --json images.json

    Another model: minivllm bench images --model path/of/a/smolvlm --width 1024 --height 1024
    """
    arguments = _engine_arguments(engine)
    with _model_directory(model) as named:
        args = EngineArgs.from_kwargs(**(named | {"compile_in_background": False} | arguments))
        sizes, args = _with_room(args, streams, tokens)
        measurements: list[Measurement] = []
        notes: list[str] = []
        for case, budget in (
            (WHOLE, sizes.most_embeds),
            (f"{units} unit{'s' * (units > 1)} a step", units * sizes.unit_embeds),
        ):
            side = replace(args, max_num_batched_encoder_embeds=budget)
            with _started(side, (width, height)) as seeing:
                if not measurements:
                    found, marks = second_question(seeing, repeats)
                    measurements += found
                    notes += marks
                found, marks = image_stream(seeing, case, streams, tokens, arrivals, pause, repeats)
                measurements += found
                notes += marks
    if model is None:
        notes.append(RANDOM)
    configuration = {
        "model": model or "random SmolVLM-256M",
        "engine": engine,
        "width": width,
        "height": height,
        "units": units,
        "streams": streams,
        "tokens": tokens,
        "arrivals": arrivals,
        "pause": pause,
        "repeats": repeats,
    }
    publish(make_report("images", configuration, measurements, _comparisons(measurements), notes), output)


def _engine_arguments(text: str) -> dict[str, Any]:
    """ "minivllm,block_size=32" -> {"block_size": 32}. Raises ConfigError."""
    sides = parse_sides([text])
    if len(sides) != 1 or sides[0].engine != "minivllm":
        raise ConfigError(f"--engine is {text!r}, but must be minivllm, with or without arguments.")
    for name, option in _SET_HERE.items():
        if name in sides[0].arguments:
            raise ConfigError(f"--engine must not hold {name}, which this benchmark sets: give {option}.")
    return sides[0].arguments


@contextmanager
def _model_directory(model: str | None) -> Iterator[dict[str, Any]]:
    """Engine arguments that name the model, a made one if it is None."""
    if model is not None:
        yield {"model": model}
        return
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory))
        yield {"model": directory, "load_format": "dummy"}


def _with_room(args: EngineArgs, streams: int, tokens: int) -> tuple[ImagesConfig, EngineArgs]:
    """(sizes of its images, the arguments with room for the workloads where the user left that open).

    A step has room for all tokens of the largest image. Raises ConfigError for a model that sees no images.
    """
    from minivllm.engine.resolve import resolve

    config = resolve(args)[0]
    if config.images is None:
        raise ConfigError(f"There is nothing to measure with images. {config.no_images}")
    image_tokens = 2 * config.images.most_embeds + 2 * PROMPT_TOKENS  # half of them for markers and text
    text_tokens = PROMPT_TOKENS + tokens
    longest = min(max(image_tokens, text_tokens), config.scheduler.max_model_len)
    room = Room(longest, streams + 2, 2 * longest + streams * text_tokens)
    changes: dict[str, Any] = {}
    if args.max_num_batched_tokens is None:
        changes["max_num_batched_tokens"] = config.scheduler.max_num_batched_tokens + image_tokens
    if args.max_model_len is None:
        changes["max_model_len"] = longest
    if all(getattr(args, name) == getattr(EngineArgs(), name) for name in _CACHE_SIZES):
        changes["num_gpu_blocks_override"] = steady_pool(room, config.cache.block_size)
    return config.images, replace(args, **changes)


@contextmanager
def _started(args: EngineArgs, size: tuple[int, int]) -> Iterator[SeeingEngine]:
    from minivllm.frontend.llm_engine import LLMEngine

    with LLMEngine.from_args(args) as engine:
        yield SeeingEngine(engine, size)


def second_question(seeing: SeeingEngine, repeats: int) -> tuple[list[Measurement], list[str]]:
    """Two questions about each of several new images, and how the second ones compare with the marks."""
    asked: dict[str, list[Asked]] = {FIRST: [], SECOND: []}
    for repeat in range(-1, repeats):
        picture = seeing.picture()
        for found in asked.values():
            one = seeing.ask(picture)
            if repeat >= 0:
                found.append(one)
    measurements = []
    for side, found in asked.items():
        figures: dict[tuple[str, str], list[float]] = {
            ("TTFT", "ms"): [1e3 * one.seconds for one in found],
            ("encoded units", "count"): [one.encoded_units for one in found],
            ("images whose pixels are asked for", "count"): [one.pixels_asked for one in found],
            ("computed tokens", "tok"): [one.computed_tokens for one in found],
        }
        measurements += [
            Measurement(AGAIN, side, metric, unit, "lower", samples)
            for (metric, unit), samples in figures.items()
        ]
    most = PROMPT_TOKENS + seeing.engine.client.config.cache.block_size - 1
    largest = {one.metric: max(one.samples) for one in measurements if one.side == SECOND}
    first, second = (median([one.seconds for one in asked[side]]) for side in (FIRST, SECOND))
    return measurements, [
        f"{AGAIN}: {seeing.span_tokens} tokens stand for it.",
        mark(f"{SECOND}, encoded units", largest["encoded units"], most=0),
        mark(f"{SECOND}, images asked for", largest["images whose pixels are asked for"], most=0),
        mark(f"{SECOND}, computed tokens", largest["computed tokens"], most=most),
        mark(f"{SECOND}, TTFT / that of the first", second / first, most=0.15),
    ]


def image_stream(
    seeing: SeeingEngine, case: str, streams: int, tokens: int, arrivals: int, pause: int, repeats: int
) -> tuple[list[Measurement], list[str]]:
    """Text alone and beside new images, in turns, and how their gaps compare with the marks.

    case: how many units a step encodes, in words.
    """
    gaps: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    answered: list[float] = []
    steps: list[float] = []
    for repeat in range(-1, repeats):
        for side in list(gaps)[:: 1 if repeat % 2 else -1]:
            count = 0 if side == ALONE else arrivals if repeat >= 0 else 1
            found = seeing.decode(streams, tokens, count, pause)
            if repeat < 0:
                continue
            gaps[side] += [1e3 * gap for gap in found.gaps]
            if side == BESIDE:
                answered.append(found.answered)
                steps += found.encoding_steps
    name = f"text, {case}"
    measurements = [Measurement(name, side, GAP, "ms", "lower", samples) for side, samples in gaps.items()]
    measurements += [
        Measurement(name, BESIDE, "images answered meanwhile", "count", "higher", answered),
        Measurement(name, BESIDE, "steps that encode an image", "count", "lower", steps),
    ]
    middle = median(gaps[BESIDE]) / median(gaps[ALONE])
    tail = percentile(gaps[BESIDE], 0.99) / percentile(gaps[ALONE], 0.99)
    ratios = f"{name}, median gap {BESIDE} / alone", f"{name}, p99 gap {BESIDE} / alone"
    if case != WHOLE:
        return measurements, [mark(ratios[0], middle, most=1.05), mark(ratios[1], tail, most=2)]
    on_cpu = seeing.engine.client.config.device == "cpu"
    return measurements, [
        mark(ratios[0], middle),
        mark(f"{ratios[1]}, the reason for units", tail, least=10 if on_cpu else None),
    ]


def mark(what: str, value: float, *, most: float | None = None, least: float | None = None) -> str:
    """A measured value in a sentence, beside its mark if it has one: the most or the least it should be."""
    if most is not None:
        return f"{what}: {value:,.4g} (mark: at most {most:g}, {'holds' if value <= most else 'missed'})."
    if least is not None:
        return f"{what}: {value:,.4g} (mark: at least {least:g}, {'holds' if value >= least else 'missed'})."
    return f"{what}: {value:,.4g}."


def _comparisons(measurements: Sequence[Measurement]) -> list[Comparison]:
    """The second question against the first, and text beside images against text alone."""
    found: list[Comparison] = []
    for side, against in ((SECOND, FIRST), (BESIDE, ALONE)):
        for case in dict.fromkeys(one.case for one in measurements if one.side == side):
            ours, theirs = (
                {one.metric: one for one in measurements if (one.case, one.side) == (case, name)}
                for name in (side, against)
            )
            found += compared(ours, theirs)
    return found
