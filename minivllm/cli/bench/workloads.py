"""Seeded workloads: lists of requests whose prompts are fixed as token ids, so that every engine gets the same ones.

Lengths and arrivals follow from the seed alone. Contents follow from seed and repetition: a prefix cache must not turn
the second repetition into another experiment. All of it is offline.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from minivllm.cli.bench.drive import Task
from minivllm.errors import ConfigError, RequestError

FORMS = {
    "fixed:REQUESTS:PROMPT:OUTPUT": "equal lengths, all at once",
    "random:REQUESTS:LOW:HIGH": "prompt and output lengths uniform in LOW to HIGH, all at once",
    "nano-256": "256 requests, prompt and output lengths uniform in 100 to 1024, all at once",
    "shared-prefix:REQUESTS:PREFIX:SUFFIX:OUTPUT": "every prompt begins with the same PREFIX tokens",
    "multi-turn:CONVERSATIONS:TURNS:TOKENS:OUTPUT": "every turn sends the whole conversation and TOKENS more",
    "long-among-decodes:REQUESTS:LONG": "short prompts that decode 128 tokens; a prompt of LONG comes after 1 s",
    "bursts:BURSTS:SIZE:SECONDS:LOW:HIGH": "SIZE requests at once, every SECONDS; lengths uniform",
    "poisson:REQUESTS:RATE:LOW:HIGH": "independent arrivals, RATE per second; lengths uniform",
    "PATH.jsonl": 'lines of {"prompt_token_ids": […], "max_tokens": n, "arrival": seconds}',
}


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    tasks: list[Task]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(task.prompt) + task.max_tokens for task in self.tasks)

    @property
    def at_once(self) -> bool:
        """True if every request is there from the start."""
        return all(task.arrival == 0 and task.after is None for task in self.tasks)


@dataclass(frozen=True)
class Shape:
    """A request before its contents: lengths [tokens], arrival [seconds], the request it waits for."""

    prompt: int
    output: int
    arrival: float = 0.0
    after: int | None = None


def make_workload(text: str, vocab_size: int, seed: int = 0, repetition: int = 0) -> Workload:
    """The workload that ``text`` names (see FORMS). Raises ConfigError for what is none of them.

    Lengths and arrivals depend on ``seed``, token ids on ``repetition`` too (a file's are as they are).
    """
    if text.endswith(".jsonl"):
        return Workload(text, _read_jsonl(Path(text), vocab_size))
    name, *fields = (text if text != "nano-256" else "random:256:100:1024").split(":")
    maker = _MAKERS.get(name)
    if maker is None:
        raise _unknown(text)
    make, types = maker
    if len(fields) != len(types):
        raise _unknown(text)
    try:
        numbers = [kind(value) for kind, value in zip(types, fields)]
    except ValueError:
        raise _unknown(text) from None
    if not all(0 < number < 1e9 for number in numbers):
        raise _unknown(text)
    tasks = make(
        random.Random(f"shapes/{seed}"), random.Random(f"ids/{text}/{seed}/{repetition}"), vocab_size, *numbers
    )
    return Workload(text, tasks)


def timed_by(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests with Poisson arrivals of ``rate`` per second. Turns of a conversation still wait for it."""
    source = random.Random(f"arrivals/{seed}")
    moment, tasks = 0.0, []
    for task in workload.tasks:
        if task.after is not None:
            tasks.append(task)
            continue
        tasks.append(replace(task, arrival=moment))
        moment += source.expovariate(rate)
    return Workload(f"{workload.name} at {rate:g}/s", tasks)


def _unknown(text: str) -> ConfigError:
    forms = "; ".join(f"{form} ({meaning})" for form, meaning in FORMS.items())
    return ConfigError(f"{text!r} is no workload. There are, with numbers above 0: {forms}.")


def random_ids(source: random.Random, count: int, vocab_size: int) -> list[int]:
    """Token ids that any model can take."""
    return [source.randrange(vocab_size) for _ in range(count)]


def _fill(shapes: list[Shape], ids: random.Random, vocab_size: int) -> list[Task]:
    return [Task(random_ids(ids, s.prompt, vocab_size), s.output, s.arrival, s.after) for s in shapes]


def _uniform(lengths: random.Random, low: int, high: int) -> tuple[int, int]:
    if low > high:
        raise ConfigError(f"Lengths from {low} to {high} are none: give the smaller number first.")
    return lengths.randint(low, high), lengths.randint(low, high)


def _fixed(
    lengths: random.Random, ids: random.Random, vocab_size: int, requests: int, prompt: int, output: int
) -> list[Task]:
    return _fill([Shape(prompt, output)] * requests, ids, vocab_size)


def _random(
    lengths: random.Random, ids: random.Random, vocab_size: int, requests: int, low: int, high: int
) -> list[Task]:
    return _fill([Shape(*_uniform(lengths, low, high)) for _ in range(requests)], ids, vocab_size)


def _shared_prefix(
    lengths: random.Random, ids: random.Random, vocab_size: int, requests: int, prefix: int, suffix: int, output: int
) -> list[Task]:
    shared = random_ids(ids, prefix, vocab_size)
    return [Task(shared + random_ids(ids, suffix, vocab_size), output) for _ in range(requests)]


def _multi_turn(
    lengths: random.Random,
    ids: random.Random,
    vocab_size: int,
    conversations: int,
    turns: int,
    tokens: int,
    output: int,
) -> list[Task]:
    """The answers in the history are made up, for the prompts must not depend on what an engine says."""
    tasks: list[Task] = []
    for _ in range(conversations):
        history: list[int] = []
        for turn in range(turns):
            history = history + random_ids(ids, tokens, vocab_size)
            tasks.append(Task(history, output, after=len(tasks) - 1 if turn else None))
            history = history + random_ids(ids, output, vocab_size)
    return tasks


def _long_among_decodes(
    lengths: random.Random, ids: random.Random, vocab_size: int, requests: int, long: int
) -> list[Task]:
    return _fill([Shape(32, 128)] * requests + [Shape(long, 16, arrival=1.0)], ids, vocab_size)


def _bursts(
    lengths: random.Random,
    ids: random.Random,
    vocab_size: int,
    bursts: int,
    size: int,
    seconds: float,
    low: int,
    high: int,
) -> list[Task]:
    shapes = [Shape(*_uniform(lengths, low, high), burst * seconds) for burst in range(bursts) for _ in range(size)]
    return _fill(shapes, ids, vocab_size)


def _poisson(
    lengths: random.Random, ids: random.Random, vocab_size: int, requests: int, rate: float, low: int, high: int
) -> list[Task]:
    moment, shapes = 0.0, []
    for _ in range(requests):
        shapes.append(Shape(*_uniform(lengths, low, high), moment))
        moment += lengths.expovariate(rate)
    return _fill(shapes, ids, vocab_size)


_MAKERS: dict[str, tuple[Callable[..., list[Task]], tuple[type, ...]]] = {
    "fixed": (_fixed, (int, int, int)),
    "random": (_random, (int, int, int)),
    "shared-prefix": (_shared_prefix, (int, int, int, int)),
    "multi-turn": (_multi_turn, (int, int, int, int)),
    "long-among-decodes": (_long_among_decodes, (int, int)),
    "bursts": (_bursts, (int, int, float, int, int)),
    "poisson": (_poisson, (int, float, int, int)),
}


def _read_jsonl(path: Path, vocab_size: int) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
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
        ids, max_tokens, arrival = entry.get("prompt_token_ids"), entry.get("max_tokens"), entry.get("arrival", 0.0)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise ValueError(f"prompt_token_ids must be a list of ids below {vocab_size}")
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError("max_tokens must be a whole number of at least 1")
        if type(arrival) not in (int, float) or not 0 <= arrival < 1e9:
            raise ValueError("arrival must be a number of seconds, at least 0")
    except ValueError as error:
        raise RequestError(f"Line {number} of the workload {path} is not a request: {error}.") from None
    return Task(ids, max_tokens, float(arrival))
