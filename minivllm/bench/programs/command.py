"""``minivllm bench programs``: the five programs of the language, against the same requests without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import typer

from minivllm.bench.programs.requests import Asked, record, send_plainly
from minivllm.bench.reports.report import Measurement, OutputOptions, compared, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs

LANGUAGE, PLAIN = "language", "plain requests"


@with_options
def programs(
    args: EngineArgs,
    output: OutputOptions,
    copies: Annotated[int, typer.Option(min=1, help="Calls of each program that run together.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, each with an empty cache.")] = 3,
) -> None:
    """Measure programs of the language against the same requests without it.

    Plain requests send the whole text each time, to an engine that reuses whole blocks of it, with answers of
    the same lengths and without structures. Both engines are in this process and take turns.

    Example: minivllm bench programs smollm2 --max-model-len 2048
    """
    from minivllm import LLM
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.lang.engines import SteppedEngine
    from minivllm.lang.examples.programs import INPUTS

    args = replace(args, compile_in_background=False)
    samples: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        engines = {
            LANGUAGE: stack.enter_context(LLM(engine=LLMEngine.from_args(args))),
            PLAIN: stack.enter_context(
                LLM(engine=LLMEngine.from_args(replace(args, reuse_partial_blocks=False)))
            ),
        }

        def measure(
            case: str, side: str, work: Callable[[SteppedEngine], Coroutine[Any, Any, Any]], keep: bool
        ) -> Any:
            llm = engines[side]
            llm.reset_prefix_cache()
            before, start = llm.get_metrics().num_computed_tokens, time.perf_counter()
            result = asyncio.run(work(SteppedEngine(llm)))
            seconds = time.perf_counter() - start
            if keep:
                computed = llm.get_metrics().num_computed_tokens - before
                samples.setdefault((case, side, "computed tokens"), []).append(computed)
                samples.setdefault((case, side, "speed"), []).append(copies / seconds)
            return result

        for number in range(-1, repeats):  # the first round warms up
            for name, (program, argument) in INPUTS.items():
                greedy = program.using(temperature=0.0)
                calls = [(greedy, f"{argument} ({number} {copy})") for copy in range(copies)]
                found = measure(name, LANGUAGE, partial(record, calls=calls), number >= 0)
                asked: list[list[Asked]] = [recorder.asked for recorder, _ in found]
                measure(name, PLAIN, partial(send_plainly, calls=asked), number >= 0)
    measurements = [
        Measurement(case, side, metric, "programs/s", "higher", values)
        if metric == "speed"
        else Measurement(case, side, metric, "tok", "lower", values)
        for (case, side, metric), values in samples.items()
    ]
    comparisons = []
    for case in INPUTS:
        ours, theirs = (
            {one.metric: one for one in measurements if (one.case, one.side) == (case, side)}
            for side in (LANGUAGE, PLAIN)
        )
        comparisons += compared(ours, theirs)
    configuration = {"engine": asdict(args), "copies": copies, "repeats": repeats}
    publish(make_report("programs", configuration, measurements, comparisons), output)
