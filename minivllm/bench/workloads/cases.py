"""What is measured: a case says which requests one repetition sends, and which figures come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.bench.reports.figures import Figure, decode_speed, latency_figures, throughput_figures
from minivllm.bench.sides.drive import Answer, Room, Task
from minivllm.bench.workloads.workloads import arrive, make_workload
from minivllm.errors import ConfigError

WARM_UP_TOKENS = 8
"""Of each request that warms up: enough for every kind of step to have run."""


class Case(Protocol):
    """x: place on the axis of a sweep. room: what its requests need."""

    @property
    def x(self) -> float | None: ...

    @property
    def name(self) -> str: ...

    @property
    def room(self) -> Room: ...

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        """The requests of a repetition, the same for every engine; repetition -1 is the warm-up."""

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        """What the answer to ``tasks`` says."""


@dataclass(frozen=True)
class SpeedCase:
    """Tokens per second of one kind of work.

    Decoding while ``batch`` requests decode together, by the times of their tokens; of a single new token, the prefill:
    prompt tokens up to that token.
    """

    batch: int
    prompt_tokens: int = 128
    new_tokens: int = 64
    x: float | None = None

    @property
    def name(self) -> str:
        if self.new_tokens == 1:
            return f"prefill {self.prompt_tokens}"
        return f"decode {self.new_tokens}, batch {self.batch}, prompt {self.prompt_tokens}"

    @property
    def room(self) -> Room:
        longest = self.prompt_tokens + self.new_tokens
        return Room(longest, self.batch, self.batch * longest)

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        new_tokens = self.new_tokens if repetition >= 0 else min(self.new_tokens, WARM_UP_TOKENS)
        text = f"fixed:{self.batch}:{self.prompt_tokens}:{new_tokens}"
        return make_workload(text, vocab_size, repetition=repetition)

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        if any(len(record.token_ids) < self.new_tokens for record in answer.records):
            return []  # refused, or ended early: the time is not that of this case
        prefill = [self.prompt_tokens / answer.seconds]
        speed = prefill if self.new_tokens == 1 else decode_speed(answer.records)
        return [Figure("speed", "tok/s", "higher", speed)]


@dataclass(frozen=True)
class WorkloadCase:
    """A workload from its first arrival to its last token. rate: Poisson arrivals per second in place of its own."""

    text: str
    at_a_time: int
    seed: int = 0
    rate: float | None = None
    x: float | None = None

    @property
    def name(self) -> str:
        return self.text if self.rate is None else f"{self.text} at {self.rate:g}/s"

    @property
    def room(self) -> Room:
        tasks = self.tasks(2**31, 0)
        lengths = sorted((len(task.prompt) + task.max_tokens for task in tasks), reverse=True)[: self.at_a_time]
        return Room(lengths[0], len(lengths), sum(lengths))

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        tasks = make_workload(self.text, vocab_size, self.seed, repetition)
        return tasks if self.rate is None else arrive(tasks, f"poisson:{self.rate}", self.seed)

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        return throughput_figures(tasks, answer) + latency_figures(answer.records)


def parse_case(text: str) -> Case:
    """ "decode:16", "decode:16:300" (prompt tokens), "prefill:512", or a workload. Raises ConfigError for others."""
    kind, *sizes = text.split(":")
    if kind not in ("decode", "prefill"):
        return WorkloadCase(text, at_a_time=64)
    numbers = [int(size) for size in sizes if size.isdigit()]
    if len(numbers) < len(sizes) or 0 in numbers or len(numbers) not in ((1, 2) if kind == "decode" else (1,)):
        raise ConfigError(f"The case {text!r} must be decode:BATCH[:PROMPT_TOKENS] or prefill:PROMPT_TOKENS.")
    return SpeedCase(*numbers) if kind == "decode" else SpeedCase(1, numbers[0], 1)
