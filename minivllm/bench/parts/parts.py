"""Times the parts of an engine's step from outside: methods are wrapped while one looks, and put back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine


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


@dataclass
class StepTimes:
    """Of every step: the whole, and each part of it [seconds]. A part that a step called several times is summed."""

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


Place = tuple[str, Any, str]
"""(name of the part, owner, method)."""


def engine_core(engine: LLMEngine) -> Any:
    """The core in this process. Raises ConfigError if it lives in another one, where nothing can be wrapped."""
    core = getattr(engine.client, "core", None)
    if core is None:
        raise ConfigError("This benchmark looks into the engine's parts, so the engine must run in this process.")
    return core


def host_parts(engine: LLMEngine) -> list[Place]:
    """What a step does besides computing the model."""
    core = engine_core(engine)
    runner = core.executor.worker.runner
    return [
        ("schedule", core.scheduler, "schedule"),
        ("follow differences", runner.batch, "apply"),
        ("build inputs", runner.model, "build"),
        ("update from output", core.scheduler, "update_from_output"),
        ("frontend", engine.output_processor, "process_outputs"),
    ]


def start_decoding(engine: LLMEngine, running: int, prompt_tokens: int, new_tokens: int) -> None:
    """Add requests of random ids and step until all of them decode."""
    from minivllm.sampling_params import OutputKind, SamplingParams

    source = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    for _ in range(running):
        prompt = [source.randrange(engine.client.model_vocab_size) for _ in range(prompt_tokens)]
        engine.add_request(None, {"prompt_token_ids": prompt}, params)
    while engine.stats().num_waiting or engine.stats().num_steps == 0:
        engine.step()


def time_steps(engine: LLMEngine, places: Sequence[Place], steps: int) -> StepTimes:
    """Run ``steps`` steps and time them and their parts."""
    times = StepTimes(parts={name: [] for name, _, _ in places})
    calls: dict[str, list[float]] = {name: [] for name, _, _ in places}
    with ExitStack() as stack:
        for name, owner, method in places:
            stack.enter_context(timed(owner, method, calls[name]))
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            times.whole.append(time.perf_counter() - started)
            for name, seconds in calls.items():
                times.parts[name].append(sum(seconds))
                seconds.clear()
    return times


def decode_args(args: EngineArgs, running: int, length: int) -> EngineArgs:
    """The arguments with room for ``running`` requests of ``length`` tokens where the user left it open."""
    from dataclasses import replace

    return replace(
        args,
        max_num_seqs=args.max_num_seqs or running,
        max_model_len=args.max_model_len or length,
    )
