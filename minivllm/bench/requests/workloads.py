"""Seeded workloads, and the cases that are measured with them.

A workload is a list of requests whose prompts are fixed as token ids, so that every engine gets the same
ones. Lengths and arrivals follow from the seed alone. Contents follow from seed and repetition: a prefix
cache must not turn the second repetition into another experiment. All of it is offline. A case says which
requests one repetition sends, and which figures come out of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from minivllm.bench.reports.figures import Figure, decode_speed, latency_figures, throughput_figures
from minivllm.bench.sides.drive import SAMPLING, Answer, Room, Task
from minivllm.cli.terminal.typed import read_typed_file
from minivllm.errors import ConfigError, RequestError

MOST_BYTES = 2**30
"""Of a JSONL file."""

FORMS = {
    "fixed:REQUESTS:PROMPT:OUTPUT": "equal lengths, all at once",
    "random:REQUESTS:LOW:HIGH": "prompt and output lengths uniform in LOW to HIGH, all at once",
    "nano-256": "256 requests, prompt and output lengths uniform in 100 to 1024, all at once",
    "shared-prefix:REQUESTS:PREFIX:SUFFIX:OUTPUT": "every prompt begins with the same PREFIX tokens",
    "prefix-groups:GROUPS:REQUESTS:PREFIX:SUFFIX:OUTPUT": "REQUESTS of every group begin with the same "
    "PREFIX tokens, "
    "groups in a random order",
    "system-prompt:USERS:PROMPT:TOKENS:OUTPUT": "every user's TOKENS follow the same PROMPT tokens; one user "
    "first, then the others at once",
    "n-samples:PROMPTS:SAMPLES:TOKENS:OUTPUT": "every prompt of TOKENS is sent SAMPLES times, all at once",
    "agents:AGENTS:STEPS:PROMPT:TOKENS:OUTPUT": "agents with one system prompt of PROMPT tokens; every step "
    "sends the "
    "whole history and TOKENS more, the result of a tool",
    "multi-turn:CONVERSATIONS:TURNS:TOKENS:OUTPUT": "every turn sends the whole conversation and TOKENS more",
    "long-among-decodes:REQUESTS:LONG": "short prompts that decode 128 tokens; a prompt of LONG comes after "
    "1 s",
    "prefill-load:STREAMS:TOKENS:PROMPTS:LONG:SECONDS": "STREAMS short prompts that decode TOKENS; meanwhile "
    "one of "
    "PROMPTS prompts of LONG comes every SECONDS and decodes 1",
    "bursts:BURSTS:SIZE:SECONDS:LOW:HIGH": "SIZE requests at once, every SECONDS; lengths uniform",
    "poisson:REQUESTS:RATE:LOW:HIGH": "independent arrivals, RATE per second; lengths uniform",
    "PATH.jsonl": 'lines of {"prompt_token_ids": […], "max_tokens": n, "arrival": seconds}',
}

ARRIVAL_FORMS = {
    "poisson:RATE": "independent, RATE per second",
    "gamma:RATE:SHAPE": "RATE per second, gamma-distributed gaps: below SHAPE 1 burstier than Poisson, above "
    "steadier",
    "burst:SIZE:SECONDS": "SIZE at once, every SECONDS",
    "trace": "the times that the workload itself gives",
}
_NUM_FIELDS = {"poisson": 1, "gamma": 2, "burst": 2}


@dataclass(frozen=True)
class Source:
    """Where the numbers come from: lengths and arrivals from one generator,
    token ids that any model can take from another."""

    lengths: random.Random
    contents: random.Random
    vocab_size: int

    def ids(self, count: int) -> list[int]:
        return [self.contents.randrange(self.vocab_size) for _ in range(count)]

    def uniform(self, low: int, high: int, arrival: float = 0.0) -> Task:
        if low > high:
            raise ConfigError(f"Lengths from {low} to {high} are none: give the smaller number first.")
        return Task(self.ids(self.lengths.randint(low, high)), self.lengths.randint(low, high), arrival)


def make_workload(text: str, vocab_size: int, seed: int = 0, repetition: int = 0) -> list[Task]:
    """The requests of the workload that ``text`` names (see FORMS), in the order of their arrival.

    Lengths and arrivals depend on ``seed``, token ids on ``repetition`` too (a file's are as they are).
    Raises ConfigError for what is none of the forms.
    """
    if text.endswith(".jsonl"):
        return _read_jsonl(Path(text), vocab_size)
    name, *fields = (text if text != "nano-256" else "random:256:100:1024").split(":")
    make, types = _MAKERS.get(name, (_fixed, ()))
    numbers = _numbers(fields, types)
    if numbers is None:
        raise _unknown(f"{text!r} is no workload. There are, with numbers above 0:", FORMS)
    contents = random.Random(f"ids/{text}/{seed}/{repetition}")
    return make(Source(random.Random(f"shapes/{seed}"), contents, vocab_size), *numbers)


def _numbers(fields: Sequence[str], types: Sequence[type]) -> list[Any] | None:
    """The fields as numbers above 0 of these types; None if they are none."""
    try:
        numbers = [kind(field) for kind, field in zip(types, fields, strict=True)]
    except ValueError:
        return None
    return numbers if numbers and all(0 < number < 1e9 for number in numbers) else None


def _unknown(what: str, forms: Mapping[str, str]) -> ConfigError:
    known = "; ".join(f"{form} ({meaning})" for form, meaning in forms.items())
    return ConfigError(f"{what} {known}.")


def _fixed(source: Source, requests: int, prompt: int, output: int) -> list[Task]:
    return [Task(source.ids(prompt), output) for _ in range(requests)]


def _random(source: Source, requests: int, low: int, high: int) -> list[Task]:
    return [source.uniform(low, high) for _ in range(requests)]


def _shared_prefix(source: Source, requests: int, prefix: int, suffix: int, output: int) -> list[Task]:
    shared = source.ids(prefix)
    return [Task(shared + source.ids(suffix), output) for _ in range(requests)]


def _prefix_groups(
    source: Source, groups: int, requests: int, prefix: int, suffix: int, output: int
) -> list[Task]:
    order = [group for group in range(groups) for _ in range(requests)]
    source.lengths.shuffle(order)
    shared = [source.ids(prefix) for _ in range(groups)]
    return [Task(shared[group] + source.ids(suffix), output) for group in order]


def _multi_turn(source: Source, conversations: int, turns: int, tokens: int, output: int) -> list[Task]:
    """The answers in the history are made up, for the prompts must not depend on what an engine says."""
    tasks: list[Task] = []
    for _ in range(conversations):
        history: list[int] = []
        for turn in range(turns):
            history = history + source.ids(tokens)
            tasks.append(Task(history, output, after=len(tasks) - 1 if turn else None))
            history = history + source.ids(output)
    return tasks


def _system_prompt(source: Source, users: int, prompt: int, tokens: int, output: int) -> list[Task]:
    first, *others = _shared_prefix(source, users, prompt, tokens, output)
    return [first, *(replace(task, after=0) for task in others)]


def _n_samples(source: Source, prompts: int, samples: int, tokens: int, output: int) -> list[Task]:
    return [
        Task(prompt, output)
        for prompt in (source.ids(tokens) for _ in range(prompts))
        for _ in range(samples)
    ]


def _agents(source: Source, agents: int, steps: int, prompt: int, tokens: int, output: int) -> list[Task]:
    system, tasks = source.ids(prompt), list[Task]()
    for _ in range(agents):
        first = len(tasks)
        tasks += [
            replace(
                task, prompt=system + task.prompt, after=None if task.after is None else first + task.after
            )
            for task in _multi_turn(source, 1, steps, tokens, output)
        ]
    return tasks


def _long_among_decodes(source: Source, requests: int, long: int) -> list[Task]:
    return [*_fixed(source, requests, 32, 128), Task(source.ids(long), 16, arrival=1.0)]


def _prefill_load(
    source: Source, streams: int, tokens: int, prompts: int, long: int, seconds: float
) -> list[Task]:
    arrivals = [seconds * (number + 1) for number in range(prompts)]
    return _fixed(source, streams, 32, tokens) + [Task(source.ids(long), 1, arrival) for arrival in arrivals]


def _bursts(source: Source, bursts: int, size: int, seconds: float, low: int, high: int) -> list[Task]:
    return [source.uniform(low, high, burst * seconds) for burst in range(bursts) for _ in range(size)]


def _poisson(source: Source, requests: int, rate: float, low: int, high: int) -> list[Task]:
    moment, tasks = 0.0, []
    for _ in range(requests):
        tasks.append(source.uniform(low, high, moment))
        moment += source.lengths.expovariate(rate)
    return tasks


def arrive(requests: Sequence[Task], text: str, seed: int = 0) -> list[Task]:
    """The same requests in the same order at the times that ``text`` names (see ARRIVAL_FORMS).

    The times depend on ``seed`` alone. Turns of a conversation go on waiting for the turn before. Raises
    ConfigError for what is none of the forms.
    """
    if text == "trace":
        return list(requests)
    name, *fields = text.split(":")
    numbers = _numbers(fields, [float] * _NUM_FIELDS.get(name, 0))
    if numbers is None:
        raise _unknown(f"--arrivals is {text!r}, but must be, with numbers above 0:", ARRIVAL_FORMS)
    source = random.Random(f"arrivals/{seed}")
    moment, num_arrived, tasks = 0.0, 0, list[Task]()
    for task in requests:
        if task.after is not None:
            tasks.append(task)
            continue
        if name == "burst":
            moment = num_arrived // max(1, int(numbers[0])) * numbers[1]
        elif num_arrived:
            shape = 1.0 if name == "poisson" else numbers[1]
            moment += source.gammavariate(shape, 1.0 / (numbers[0] * shape))
        tasks.append(replace(task, arrival=moment))
        num_arrived += 1
    return tasks


_MAKERS: dict[str, tuple[Callable[..., list[Task]], tuple[type, ...]]] = {
    "fixed": (_fixed, (int, int, int)),
    "random": (_random, (int, int, int)),
    "shared-prefix": (_shared_prefix, (int, int, int, int)),
    "prefix-groups": (_prefix_groups, (int, int, int, int, int)),
    "system-prompt": (_system_prompt, (int, int, int, int)),
    "n-samples": (_n_samples, (int, int, int, int)),
    "agents": (_agents, (int, int, int, int, int)),
    "multi-turn": (_multi_turn, (int, int, int, int)),
    "long-among-decodes": (_long_among_decodes, (int, int)),
    "prefill-load": (_prefill_load, (int, int, int, int, float)),
    "bursts": (_bursts, (int, int, float, int, int)),
    "poisson": (_poisson, (int, float, int, int)),
}


def _read_jsonl(path: Path, vocab_size: int) -> list[Task]:
    try:
        lines = read_typed_file(path, MOST_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"The workload {path} cannot be read: {error}.") from None
    tasks = [_task_of(path, number, line, vocab_size) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise RequestError(f"The workload {path} holds no request.")
    return sorted(tasks, key=lambda task: task.arrival)


def _task_of(path: Path, number: int, line: str, vocab_size: int) -> Task:
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("it is no JSON object")
        if unknown := set(entry) - {"prompt_token_ids", "max_tokens", "arrival"}:
            raise ValueError(f"unknown are: {', '.join(sorted(unknown))}")
        ids, max_tokens, arrival = (
            entry.get("prompt_token_ids"),
            entry.get("max_tokens"),
            entry.get("arrival", 0.0),
        )
        if (
            not isinstance(ids, list)
            or not ids
            or not all(type(i) is int and 0 <= i < vocab_size for i in ids)
        ):
            raise ValueError(f"prompt_token_ids must be a list of ids below {vocab_size}")
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError("max_tokens must be a whole number of at least 1")
        if type(arrival) not in (int, float) or not 0 <= arrival < 1e9:
            raise ValueError("arrival must be a number of seconds, at least 0")
    except ValueError as error:
        raise RequestError(f"Line {number} of the workload {path} is not a request: {error}.") from None
    return Task(ids, max_tokens, float(arrival))


WARM_UP_TOKENS = 8
"""Of each request that warms up: enough for every kind of step to have run."""


class Case(Protocol):
    """x: place on the axis of a sweep. room: what its requests need. sampling: see Task."""

    @property
    def x(self) -> float | None: ...

    @property
    def name(self) -> str: ...

    @property
    def room(self) -> Room: ...

    @property
    def sampling(self) -> Mapping[str, float]: ...

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        """The requests of a repetition, the same for every engine; repetition -1 is the warm-up."""

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        """Figures from the answer to ``tasks``."""


@dataclass(frozen=True)
class SpeedCase:
    """Tokens per second of one kind of work.

    Decoding while ``batch`` requests decode together, by the times of their tokens; of a single new token,
    the prefill: prompt tokens up to that token. sampling: see Task.
    """

    batch: int
    prompt_tokens: int = 128
    new_tokens: int = 64
    x: float | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if self.new_tokens == 1:
            return f"prefill {self.prompt_tokens}"
        decode = f"decode {self.new_tokens}, batch {self.batch}, prompt {self.prompt_tokens}"
        return decode + _named(self.sampling)

    @property
    def room(self) -> Room:
        longest = self.prompt_tokens + self.new_tokens
        return Room(longest, self.batch, self.batch * longest)

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        new_tokens = self.new_tokens if repetition >= 0 else min(self.new_tokens, WARM_UP_TOKENS)
        text = f"fixed:{self.batch}:{self.prompt_tokens}:{new_tokens}"
        tasks = make_workload(text, vocab_size, repetition=repetition)
        return [replace(task, sampling=dict(self.sampling)) for task in tasks]

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        if any(len(record.token_ids) < self.new_tokens for record in answer.records):
            return []  # refused, or ended early: the time is not that of this case
        prefill = [self.prompt_tokens / answer.seconds]
        speed = prefill if self.new_tokens == 1 else decode_speed(answer.records)
        return [Figure("speed", "tok/s", "higher", speed)]


@dataclass(frozen=True)
class WorkloadCase:
    """A workload from its first arrival to its last token.
    rate: Poisson arrivals per second in place of its own. sampling: see Task."""

    text: str
    at_a_time: int
    seed: int = 0
    rate: float | None = None
    x: float | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name = self.text if self.rate is None else f"{self.text} at {self.rate:g}/s"
        return name + _named(self.sampling)

    @property
    def room(self) -> Room:
        tasks = self.tasks(2**31, 0)
        lengths = sorted((len(task.prompt) + task.max_tokens for task in tasks), reverse=True)[
            : self.at_a_time
        ]
        return Room(lengths[0], len(lengths), sum(lengths))

    def tasks(self, vocab_size: int, repetition: int) -> list[Task]:
        tasks = make_workload(self.text, vocab_size, self.seed, repetition)
        tasks = [replace(task, sampling=dict(self.sampling)) for task in tasks]
        return tasks if self.rate is None else arrive(tasks, f"poisson:{self.rate}", self.seed)

    def figures(self, tasks: Sequence[Task], answer: Answer) -> list[Figure]:
        return throughput_figures(tasks, answer) + latency_figures(answer.records)


def parse_case(text: str) -> Case:
    """ "decode:16", "decode:16:300" (prompt tokens), "decode:16,temperature=0.7,top_p=0.9", "prefill:512", or
    a workload. Raises ConfigError for others."""
    form, *given = text.split(",")
    kind, *sizes = form.split(":")
    if kind not in ("decode", "prefill"):
        return WorkloadCase(form, at_a_time=64, sampling=_sampling(text, given))
    numbers = [int(size) for size in sizes if size.isdigit()]
    if (
        len(numbers) < len(sizes)
        or 0 in numbers
        or len(numbers) not in ((1, 2) if kind == "decode" else (1,))
    ):
        raise ConfigError(f"The case {text!r} must be decode:BATCH[:PROMPT_TOKENS] or prefill:PROMPT_TOKENS.")
    if kind == "decode":
        case = SpeedCase(numbers[0], numbers[1]) if len(numbers) > 1 else SpeedCase(numbers[0])
        return replace(case, sampling=_sampling(text, given))
    if given:
        raise ConfigError(f"The case {text!r} draws one token: it takes no parameters of sampling.")
    return SpeedCase(1, numbers[0], 1)


def _named(sampling: Mapping[str, float]) -> str:
    return "".join(f", {name} {value:g}" for name, value in sampling.items())


def _sampling(text: str, given: Sequence[str]) -> dict[str, float]:
    """Of entries NAME=NUMBER; top_k as an integer. Raises ConfigError."""
    found: dict[str, float] = {}
    for entry in given:
        name, _, value = entry.partition("=")
        try:
            found[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            name = ""
        if name not in SAMPLING:
            raise ConfigError(
                f"{entry!r} in the case {text!r} must be NAME=NUMBER, with one of {', '.join(SAMPLING)}."
            )
    if found and found.get("temperature", 0.0) <= 0.0:
        raise ConfigError(f"The case {text!r} needs a temperature above 0 beside its other parameters.")
    return found
