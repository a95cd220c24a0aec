"""Who comes first: the order of those who wait, who gives way when the cache is full, who is served first in a step.

A policy of your own is a subclass, given to an engine by name: see ``minivllm.register_policy``.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from minivllm.errors import ConfigError
from minivllm.plugins import POLICIES
from minivllm.request import Request


class RequestQueue(ABC):
    """Waiting requests in the order in which they are admitted."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A request arrives."""

    @abstractmethod
    def prepend(self, request: Request) -> None:
        """A request comes back (preempted, or set aside): it goes before its equals."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request. Raises IndexError if none waits."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the next request. Raises IndexError if none waits."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. Raises ValueError if it does not wait."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In order of admission."""


class FCFSQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class SortedQueue(RequestQueue):
    """Lowest key first; equal ones in order of arrival, those that come back before them.

    key: of a request, compared with those of others; asked for when the request is added.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._last, self._first = 0, 0

    def add(self, request: Request) -> None:
        self._last += 1
        heapq.heappush(self._heap, (self._key(request), self._last, request))

    def prepend(self, request: Request) -> None:
        self._first -= 1
        heapq.heappush(self._heap, (self._key(request), self._first, request))

    def peek(self) -> Request:
        return self._heap[0][-1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        for index, entry in enumerate(self._heap):
            if entry[-1] is request:
                del self._heap[index]
                heapq.heapify(self._heap)
                return
        raise ValueError(f"{request.request_id} does not wait.")

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:2]))


class AdmissionPolicy(Protocol):
    """What besides blocks and budget a waiting request may need. Asked in every step about each whose turn it is.

    A request that may not run yet is set aside: those behind it are asked next, and it keeps its place in the queue.
    """

    def begin_step(self) -> None:
        """The waiting requests of a step are asked about from here on."""

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """True if the request may join those that run; a block or two may still be missing afterwards."""


class Turns(Protocol):
    """One step while it is planned. Each call hands out tokens while the budget lasts."""

    @property
    def num_scheduled_requests(self) -> int:
        """Requests that have tokens in this step so far."""

    def serve_running(self) -> None:
        """Every running request that has no tokens yet gets what it lacks.

        Where memory is short a victim gives way, or, in a step that has admitted requests, the request waits a step.
        """

    def admit_waiting(self) -> None:
        """Waiting requests join while there is room. After a preemption in this step none does."""


class SchedulingPolicy:
    """First come, first served; those who run before those who wait. Subclasses change what they want otherwise.

    uses_priority: requests may carry a priority; elsewhere it is refused.
    """

    uses_priority = False

    def make_queue(self) -> RequestQueue:
        """The queue of waiting requests."""
        return FCFSQueue()

    def choose_victim(self, running: Sequence[Request]) -> int:
        """Index of the running request that gives up its blocks; running, never empty, in order of admission."""
        return len(running) - 1

    def take_turns(self, turns: Turns) -> None:
        """Plan one step. Those who run come first by default: no one who is answered is made to stutter."""
        turns.serve_running()
        turns.admit_waiting()


class FirstComeFirstServed(SchedulingPolicy):
    """The latest to be admitted is the first to give way."""


class ByPriority(SchedulingPolicy):
    """Lowest (priority, arrival) first; the highest gives way."""

    uses_priority = True

    def make_queue(self) -> RequestQueue:
        return SortedQueue(lambda request: (request.engine_request.priority, request.engine_request.arrival_time))

    def choose_victim(self, running: Sequence[Request]) -> int:
        def rank(place: int) -> tuple[int, float, int]:
            request = running[place].engine_request
            return request.priority, request.arrival_time, place

        return max(range(len(running)), key=rank)


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of this name (see plugins.POLICIES). Raises ConfigError."""
    found = POLICIES.load(name)
    if not isinstance(found, type) or not issubclass(found, SchedulingPolicy):
        raise ConfigError(f"scheduling_policy {name!r} must be a subclass of minivllm.SchedulingPolicy (the class).")
    return found()
