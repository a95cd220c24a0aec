"""Who comes first: the order of those who wait, who gives way when the cache is full,
who is served first in a step.

A policy of your own is a subclass, given to an engine by name: see ``minivllm.register_policy``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from minivllm.errors import ConfigError
from minivllm.plugins.points import POLICIES
from minivllm.request import Request
from minivllm.scheduler.queues import FCFSQueue, RequestQueue, SortedQueue


class Turns(Protocol):
    """One step while it is planned. Each call hands out tokens while the budget lasts."""

    @property
    def num_scheduled_requests(self) -> int:
        """Requests that have tokens in this step so far."""

    @property
    def may_admit(self) -> bool:
        """Whether a waiting request could join now, if it has blocks:
        budget and a seat are left, and nothing was preempted in this step."""

    def cached_tokens(self, request: Request) -> int:
        """Known tokens of a waiting request that the prefix cache has now, in whole blocks;
        a few look-ups."""

    def serve_running(self) -> None:
        """Every running request that has no tokens yet gets what it lacks.

        Where memory is short a victim gives way, or, in a step that has admitted requests,
        the request waits a step.
        """

    def admit_waiting(self) -> None:
        """Admit waiting requests while there is room; none after a preemption in this step."""


class SchedulingPolicy:
    """First come, first served; those who run before those who wait.
    Subclasses change what they want otherwise."""

    uses_priority = False
    """Whether requests may carry a priority; elsewhere it is refused."""
    clock: Callable[[], float] = staticmethod(time.monotonic)
    """The time now [seconds], on the scale of arrival times.
    Simulations set it, and measure both in steps."""

    def make_queue(self) -> RequestQueue:
        """The queue of waiting requests."""
        return FCFSQueue()

    def choose_victim(self, running: Sequence[Request]) -> int:
        """Index of the running request that gives up its blocks;
        running, never empty, in order of admission."""
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
        return SortedQueue(
            lambda request: (request.engine_request.priority, request.engine_request.arrival_time)
        )

    def choose_victim(self, running: Sequence[Request]) -> int:
        def rank(place: int) -> tuple[int, float, int]:
            request = running[place].engine_request
            return request.priority, request.arrival_time, place

        return max(range(len(running)), key=rank)


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of this name (see plugins.POLICIES). Raises ConfigError."""
    found = POLICIES.load(name)
    if not isinstance(found, type) or not issubclass(found, SchedulingPolicy):
        raise ConfigError(
            f"scheduling_policy {name!r} must be a subclass of minivllm.SchedulingPolicy (the class)."
        )
    return found()
