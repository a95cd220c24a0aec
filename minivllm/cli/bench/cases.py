"""What is measured: a case says which runs one repetition takes, and which figures come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.cli.bench.drive import Task
from minivllm.cli.bench.figures import Figure, latency_figures, throughput_figures
from minivllm.cli.bench.sides import Answer, Room
from minivllm.cli.bench.workloads import make_workload, timed_by
from minivllm.errors import ConfigError

NEW_TOKENS = 64
Runs = list[list[Task]]


class Case(Protocol):
    """x: place on the axis of a sweep. room: what its requests need."""

    @property
    def x(self) -> float | None: ...

    @property
    def name(self) -> str: ...

    @property
    def room(self) -> Room: ...

    def runs(self, vocab_size: int, repetition: int) -> Runs:
        """Requests of each run of a repetition, the same for every engine; repetition -1 is the warm-up."""

    def figures(self, runs: Runs, answers: Sequence[Answer]) -> list[Figure]:
        """What the answers to ``runs`` say."""


@dataclass(frozen=True)
class SpeedCase:
    """Tokens per second of one kind of work.

    decode: of tokens after the first one, ``batch`` requests together. prefill: prompt tokens up to the first token.
    mixed: prompt and output tokens of whole requests. shared: as mixed, with three quarters of each prompt in common.
    """

    kind: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    x: float | None = None

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.prompt_tokens}"
        return f"{self.kind} {self.new_tokens}, batch {self.batch}, prompt {self.prompt_tokens}"

    @property
    def room(self) -> Room:
        longest = self.prompt_tokens + self.new_tokens
        return Room(longest, self.batch, self.batch * longest)

    def runs(self, vocab_size: int, repetition: int) -> Runs:
        def fresh(new_tokens: int, number: int) -> list[Task]:
            prefix = self.prompt_tokens * 3 // 4 if self.kind == "shared" and self.prompt_tokens > 3 else 0
            text = f"fixed:{self.batch}:{self.prompt_tokens}:{new_tokens}"
            if prefix:
                text = f"shared-prefix:{self.batch}:{prefix}:{self.prompt_tokens - prefix}:{new_tokens}"
            return make_workload(text, vocab_size, repetition=2 * repetition + number).tasks

        if self.kind == "decode":
            # Other prompts of the same length: a prefix cache must not spare one of the two runs its prefill, for then
            # the difference would not be decoding alone.
            return [fresh(1, 0), fresh(self.new_tokens, 1)]
        return [fresh(self.new_tokens, 0)]

    def figures(self, runs: Runs, answers: Sequence[Answer]) -> list[Figure]:
        if any(len(record.token_ids) < self.new_tokens for record in answers[-1].records):
            return []  # refused, or ended early: the time is not that of this case
        seconds = answers[-1].seconds
        if self.kind == "decode":
            seconds -= answers[0].seconds
            tokens = self.batch * (self.new_tokens - 1)
        elif self.kind == "prefill":
            tokens = self.batch * self.prompt_tokens
        else:
            tokens = self.batch * (self.prompt_tokens + self.new_tokens)
        # Noise can make the longer of two very short runs the faster one; such a pair tells nothing.
        return [Figure("speed", "tok/s", "higher", [tokens / seconds] if seconds > 0 else [])]


def parse_case(text: str) -> SpeedCase:
    """ "decode:16", "decode:16:300" (prompt tokens), "prefill:512", "mixed:8:256", "shared:8:256".

    Raises ConfigError for anything else.
    """
    kind, *sizes = text.split(":")
    numbers = [int(size) for size in sizes if size.isdigit()]
    if len(numbers) == len(sizes) and all(number > 0 for number in numbers):
        if kind in ("decode", "mixed", "shared") and len(numbers) in (1, 2):
            return SpeedCase(kind, numbers[0], numbers[1] if len(numbers) > 1 else 128, NEW_TOKENS)
        if kind == "prefill" and len(numbers) == 1:
            return SpeedCase(kind, 1, numbers[0], 1)
    raise ConfigError(
        f"The case {text!r} must be decode:BATCH, decode:BATCH:PROMPT_TOKENS, prefill:PROMPT_TOKENS, or mixed or "
        "shared with the sizes of decode."
    )


@dataclass(frozen=True)
class WorkloadCase:
    """A workload from its first arrival to its last token. rate: Poisson arrivals per second in place of its own."""

    text: str
    at_a_time: int
    seed: int = 0
    rate: float | None = None
    rates_too: bool = True
    x: float | None = None

    @property
    def name(self) -> str:
        return self.text if self.rate is None else f"{self.text} at {self.rate:g}/s"

    @property
    def room(self) -> Room:
        [tasks] = self.runs(2**31, 0)
        lengths = sorted((len(task.prompt) + task.max_tokens for task in tasks), reverse=True)[: self.at_a_time]
        return Room(lengths[0], len(lengths), sum(lengths))

    def runs(self, vocab_size: int, repetition: int) -> Runs:
        workload = make_workload(self.text, vocab_size, self.seed, repetition)
        return [(workload if self.rate is None else timed_by(workload, self.rate, self.seed)).tasks]

    def figures(self, runs: Runs, answers: Sequence[Answer]) -> list[Figure]:
        rates = throughput_figures(runs[0], answers[0]) if self.rates_too else []
        return rates + latency_figures(answers[0].records)
