"""Times the parts of an engine's step: whoever looks listens to its spans."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError
from minivllm.profiling.spans import listen

if TYPE_CHECKING:
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine


@contextmanager
def timed_spans(*names: str) -> Iterator[dict[str, list[float]]]:
    """Name of a span -> how long each of them takes [seconds], in this process, of whatever engine."""
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def begin(name: str, subject: object) -> Callable[[], None]:
        started = time.perf_counter()
        return lambda: seconds[name].append(time.perf_counter() - started)

    with listen(begin, seconds):
        yield seconds


@dataclass
class StepTimes:
    """Of every step: the whole, and each part of it [seconds]. A part that a step called several times is summed."""

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


HOST_PARTS = {
    "schedule": "schedule",
    "follow differences": "apply",
    "build inputs": "prepare",
    "update from output": "output",
    "frontend": "frontend",
}
"""What a step does besides computing the model: name of the part -> its span."""


def engine_core(engine: LLMEngine) -> Any:
    """The core in this process. Raises ConfigError if it lives in another one, whose spans are not heard here."""
    core = getattr(engine.client, "core", None)
    if core is None:
        raise ConfigError("This benchmark looks into the engine's parts, so the engine must run in this process.")
    return core


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


def time_steps(engine: LLMEngine, steps: int, parts: Mapping[str, str] | None = None) -> StepTimes:
    """Run ``steps`` steps and time them and their parts. parts: name -> span, as in HOST_PARTS."""
    parts = parts or {}
    times = StepTimes(parts={name: [] for name in parts})
    with timed_spans(*parts.values()) as spans:
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            times.whole.append(time.perf_counter() - started)
            for name, span in parts.items():
                times.parts[name].append(sum(spans[span]))
                spans[span].clear()
    return times


def decode_args(args: EngineArgs, running: int, length: int) -> EngineArgs:
    """The arguments with room for ``running`` requests of ``length`` tokens where the user left it open."""
    from dataclasses import replace

    return replace(
        args,
        max_num_seqs=args.max_num_seqs or running,
        max_model_len=args.max_model_len or length,
    )
