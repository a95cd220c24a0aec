"""Sends requests to an engine when they are due and writes down when each token came.

Needs the standard library only:
an engine may live in another Python that has nothing else of this package's needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters of sampling that all engines have under these names, or under similar ones."""


@dataclass(frozen=True)
class Task:
    """One request: token ids, and how many tokens to generate (end-of-sequence ids do not stop it).

    sampling: see SAMPLING; empty for greedy.
    arrival: when it is sent, from the start of the run or, with ``after``, from the end of that request
    [seconds]. after: index of the request that must have finished before, for the turns of a conversation.
    """

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0
    after: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Progress of one request in a step:
    new tokens, and the time of their arrival (time.perf_counter) [seconds]."""

    index: int
    token_ids: list[int]
    times: list[float]
    finished: bool = False
    error: str | None = None


@dataclass
class Record:
    """The outcome of a request. Times are from the start of the run [seconds].

    arrival: when it was due, not when the engine found time for it. times: of each token.
    error: "Class: sentence" if it failed.
    """

    arrival: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Room:
    """Room for the requests of a benchmark. longest: tokens of the longest one. running: requests at a time.

    tokens: of the ``running`` longest requests together.
    """

    longest: int
    running: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """One run of a side. counters: what the engine counted (see StepEngine.counters)."""

    seconds: float
    records: list[Record]
    peak_bytes: int
    counters: dict[str, float]


class StepEngine(Protocol):
    """The interface of every measured engine.

    facts: about what was loaded; holds at least "vocab_size". A peer's also hold "version" and "own_way", the
    name of its documented way of running a batch, and the engine has a method ``own_way(tasks)`` that runs
    requests that way.
    """

    facts: dict[str, Any]

    def reset(self) -> None:
        """Forget earlier runs (prefix cache, counters)."""

    def add(self, index: int, task: Task) -> None:
        """Take a request. May raise what the engine raises for a request that it refuses."""

    def step(self) -> Iterable[Progress]:
        """Work on the requests for a moment and tell what came out."""

    def counters(self) -> dict[str, float]:
        """Counters since ``reset``: any of kv_peak, cache_hit_rate, preemptions; and sizes: weight_bytes and
        kv_touched_bytes, or neither."""


def drive(engine: StepEngine, tasks: Sequence[Task]) -> tuple[list[Record], float]:
    """Run all tasks. Returns their records, and the time from the start to the last token [seconds]."""
    records = [Record() for _ in tasks]
    followers: dict[int, list[int]] = {}
    due: list[tuple[float, int]] = []
    for index, task in enumerate(tasks):
        if task.after is None:
            due.append((task.arrival, index))
        else:
            followers.setdefault(task.after, []).append(index)
    due.sort(reverse=True)
    running: set[int] = set()
    start = time.perf_counter()

    def finish(index: int) -> None:
        running.discard(index)
        now = time.perf_counter() - start
        due.extend((now + tasks[follower].arrival, follower) for follower in followers.get(index, ()))
        due.sort(reverse=True)

    while due or running:
        while due and due[-1][0] <= time.perf_counter() - start:
            arrival, index = due.pop()
            records[index].arrival = arrival
            running.add(index)
            try:
                engine.add(index, tasks[index])
            except Exception as error:
                records[index].error = f"{type(error).__name__}: {error}"
                finish(index)
        if not running:
            if due:
                time.sleep(max(0.0, due[-1][0] - (time.perf_counter() - start)))
            continue
        for progress in engine.step():
            record = records[progress.index]
            record.token_ids += progress.token_ids
            record.times += [moment - start for moment in progress.times]
            record.error = progress.error
            if progress.finished:
                finish(progress.index)
    return records, time.perf_counter() - start
