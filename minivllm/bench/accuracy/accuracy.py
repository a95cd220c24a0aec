"""``minivllm bench accuracy``: probabilities of a fixed text by every engine, against float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from minivllm.bench.accuracy.passages import PASSAGES
from minivllm.bench.reports.report import Measurement, OutputOptions, compared, make_report, publish
from minivllm.bench.rounds.rounds import EngineOptions
from minivllm.bench.rounds.side_processes import Side, SideSpec, complete
from minivllm.bench.sides.drive import Room
from minivllm.cli.engine.options import ModelArgument, with_options
from minivllm.cli.terminal.typed import read_typed_file
from minivllm.errors import ConfigError, RequestError
from minivllm.tokenizer.tokenizer import load_tokenizer

REFERENCE = "transformers in float32"
MOST_TEXT_BYTES = 2**20


@with_options
def accuracy(
    engines: EngineOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    text: Annotated[
        Path | None,
        typer.Option(help="A file of UTF-8, in place of three passages of about 200 tokens each."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens of a file that are read together, from its start.")
    ] = 512,
) -> None:
    """Measure how well engines predict a text, against transformers in float32.

    Perplexity is e to the mean of -log(probability) over the tokens of the text, each given those before it.
    The error is the mean distance of these logarithms from those of float32. Unlike the perplexity, it also
    counts tokens that became more probable. All tokens of a window are computed like a prompt.

    Example: minivllm bench accuracy --engine minivllm,quantization=int4 --vs llama.cpp,openvino,weights=int4
    """
    # What may be refused starts before the one that takes longest.
    specs = [*engines.specs(), SideSpec(REFERENCE, "transformers")]
    if cannot := [spec.name for spec in specs if spec.engine == "transformers-cb"]:
        raise ConfigError(
            f"{cannot[0]} gives no probabilities of a prompt: name transformers, whose layers it runs."
        )
    if senseless := [spec.name for spec in specs if {"lora", "regex"} & set(spec.arguments)]:
        raise ConfigError(
            f"A text is neither adapted nor matched: name {senseless[0]} without lora and regex."
        )
    windows = tokenized(model, text, window)
    longest = max(map(len, windows)) + 1
    found: dict[str, list[float]] = {}
    facts = {}
    for spec in specs:
        dtype = "float32" if spec.name == REFERENCE else engines.dtype
        with Side(complete(spec, model, dtype, Room(longest, running=1, tokens=longest))) as side:
            found[spec.name] = list(chain.from_iterable(map(side.log_probabilities, windows)))
            facts[spec.name] = side.facts
    num_tokens = len(found[REFERENCE])
    case = f"{num_tokens:,} tokens" + ("" if text is None else f" of {text.name}")
    first, *others = [name for name in found if name != REFERENCE]
    names = [REFERENCE, first, *others]
    figures = {name: accuracy_figures(case, name, found[name], found[REFERENCE]) for name in names}
    comparisons = [one for name in others for one in compared(figures[first], figures[name])]
    # Float32 is without an error against itself.
    comparisons += compared(figures[first], {"perplexity": figures[REFERENCE]["perplexity"]})
    configuration = {"model": model, **engines.settings(), "window": window, "sides": facts}
    measurements = [one for own in figures.values() for one in own.values()]
    publish(make_report("accuracy", configuration, measurements, comparisons), output)


def tokenized(model: str, text: Path | None, window: int) -> list[list[int]]:
    """Token ids of the passages, or of a file in windows, the last of which may be shorter. Raises
    RequestError for a file that cannot be read or is too short, ModelError without a tokenizer."""
    tokenizer = load_tokenizer(model)
    if text is None:
        return [list(tokenizer.encode(passage)) for passage in PASSAGES]
    try:
        content = read_typed_file(text, MOST_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{text} is not UTF-8.") from None
    ids = list(tokenizer.encode(content))
    windows = [ids[first : first + window] for first in range(0, len(ids), window)]
    if not (windows := [one for one in windows if len(one) > 1]):
        raise RequestError(
            f"{text} has {len(ids)} tokens, but at least 2 are needed: the first one is given."
        )
    return windows


def accuracy_figures(
    case: str, side: str, found: Sequence[float], expected: Sequence[float]
) -> Mapping[str, Measurement]:
    """Of the logarithms of the probabilities of all tokens, here and in float32 [nats]."""
    perplexity = math.exp(-math.fsum(found) / len(found))
    error = math.fsum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(found)
    return {
        "perplexity": Measurement(case, side, "perplexity", "", "lower", [perplexity]),
        "error": Measurement(case, side, "error", "nats", "lower", [error]),
    }
