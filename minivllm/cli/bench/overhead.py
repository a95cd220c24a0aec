"""``minivllm bench overhead``: what a step costs outside the model, part by part."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from minivllm.cli.engine_options import ModelArgument


@contextmanager
def timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Append how long each call of owner.name takes [seconds]."""
    original: Callable = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = original(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def overhead(
    model: ModelArgument = "smollm2",
    running: Annotated[int, typer.Option(min=1, help="Requests that decode at the same time.")] = 64,
    steps: Annotated[int, typer.Option(min=10, help="Steps to measure.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
) -> None:
    """Measure scheduling, input preparation and output processing per decode step.

    Example: minivllm bench overhead --running 64
    """
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.sampling_params import OutputKind, SamplingParams

    length = prompt_tokens + steps + 2
    args = EngineArgs(model=model, max_num_seqs=running, max_model_len=length)
    with LLMEngine.from_args(args) as engine:
        source = random.Random(0)
        params = SamplingParams(
            temperature=0.0, max_tokens=steps + 2, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )
        for _ in range(running):
            prompt = [source.randrange(engine.client.model_vocab_size) for _ in range(prompt_tokens)]
            engine.add_request(None, {"prompt_token_ids": prompt}, params)
        while engine.stats().num_waiting or engine.stats().num_steps == 0:
            engine.step()
        core = engine.client.core  # type: ignore[attr-defined]
        runner = core.executor.worker.runner
        whole: list[float] = []
        parts: dict[str, list[float]] = {}
        places = [
            ("schedule", core.scheduler, "schedule"),
            ("follow differences", runner.batch, "apply"),
            ("build inputs", runner.builder, "build"),
            ("update from output", core.scheduler, "update_from_output"),
            ("frontend", engine.output_processor, "process_outputs"),
        ]
        with ExitStack() as stack:
            for name, owner, method in places:
                stack.enter_context(timed(owner, method, parts.setdefault(name, [])))
            for _ in range(steps - 10):
                started = time.perf_counter()
                engine.step()
                whole.append(time.perf_counter() - started)
    table = Table(title=f"{running} running requests, median of {len(whole)} steps")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, seconds in parts.items():
        table.add_row(name, f"{median(seconds) * 1e3:.3f}")
    table.add_row("overhead", f"{sum(median(seconds) for seconds in parts.values()) * 1e3:.3f}", style="bold")
    table.add_row("whole step", f"{median(whole) * 1e3:.3f}")
    Console().print(table)
