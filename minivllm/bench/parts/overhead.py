"""``minivllm bench overhead``: what a step costs outside the model, part by part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from minivllm.bench.parts.parts import HOST_PARTS, decode_args, engine_core, start_decoding, time_steps
from minivllm.bench.reports.report import Measurement, OutputOptions, make_report, publish
from minivllm.bench.reports.statistics import median
from minivllm.cli.options.engine_options import EngineOptions, ModelArgument, with_model_option
from minivllm.cli.options.option_groups import with_option_groups

SETTLING_STEPS = 5
"""Steps that decode already and are not measured."""


@with_option_groups
@with_model_option
def overhead(
    engine: EngineOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    running: Annotated[int, typer.Option(min=1, help="Requests that decode at the same time.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
) -> None:
    """Measure scheduling, input preparation and output processing per decode step.

    Example: minivllm bench overhead --running 64
    """
    from minivllm.frontend.llm_engine import LLMEngine

    new_tokens = steps + SETTLING_STEPS + 8
    args = decode_args(engine.engine_args(model), running, prompt_tokens + new_tokens)
    with LLMEngine.from_args(args) as started:
        engine_core(started)
        start_decoding(started, running, prompt_tokens, new_tokens)
        time_steps(started, SETTLING_STEPS)
        times = time_steps(started, steps, HOST_PARTS)
    case = f"{running} running requests"
    overheads = [sum(parts) for parts in zip(*times.parts.values())]
    samples = {**times.parts, "overhead": overheads, "whole step": times.whole}
    measurements = [
        Measurement(case, "minivllm", name, "ms", "lower", [1e3 * value for value in seconds])
        for name, seconds in samples.items()
    ]
    shares = [part / whole for part, whole in zip(overheads, times.whole)]
    measurements.append(Measurement(case, "minivllm", "overhead / step", "share", "lower", shares))
    note = f"Overhead is {median(shares):.1%} of a step with {running} running requests."
    configuration = {"model": model, "running": running, "prompt_tokens": prompt_tokens, "engine": asdict(args)}
    publish(make_report("overhead", configuration, measurements, notes=[note]), output)
