"""Queues of the requests that wait: in order of arrival, sorted by a key, or by scores that change."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

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


class RescoredQueue(FCFSQueue):
    """In order of arrival, until it is told other scores."""

    def rescore(self, score: Callable[[Request], Any], at_most: int) -> None:
        """Sort the first ``at_most`` requests: the highest score first, equal ones as they were.
        score: called once for each of them."""
        first = [self._requests.popleft() for _ in range(min(at_most, len(self._requests)))]
        first.sort(key=score, reverse=True)
        self._requests.extendleft(reversed(first))


class SortedQueue(RequestQueue):
    """Lowest key first; equal ones in order of arrival, those that come back before them.

    key: of a request, compared with those of others; asked for when the request is added.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._last = 0
        self._first = 0

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
