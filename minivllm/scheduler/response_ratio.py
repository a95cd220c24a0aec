"""Highest response ratio next: what waits longest for its cost comes first,
and what is cached costs little."""

from __future__ import annotations

from minivllm.request import Request, RequestStatus
from minivllm.scheduler.policy import SchedulingPolicy, Turns
from minivllm.scheduler.queues import RequestQueue, RescoredQueue

MOST_RESCORED = 128
"""Requests at the head of the queue that are compared in one step; later ones keep their order."""
STEPS_PER_RESCORING = 8
"""While the first request waits for memory:
ratios change slowly, and the search costs a few microseconds a request."""
MIN_COST = 64
"""A step reads all weights for any number of tokens, so fewer tokens count as so many."""


class ByResponseRatio(SchedulingPolicy):
    """Highest (waited + cost) / cost first; the cost is the time to compute the tokens that are not cached.

    A request with a cached prefix has a small cost, so its ratio grows fast. One without grows slowly, but
    without bound. So a prefix is used while it is cached, and no request starves. (Brinch Hansen's highest
    response ratio next, with the cost that a radix cache leaves.)

    The cost is the number of these tokens over the prefill rate, and the ratio 1 + rate · waited / tokens.
    The rate is the same for all requests and changes no comparison, so nothing measures it. Equal ratios:
    fewer tokens first, then in order of arrival. Whole cached blocks count, those that only a connector has
    do not. Preempted requests come first, since they have begun their answers. While more comes than the
    engine can serve, all waits grow, those of costly requests in proportion to their cost.
    """

    def __init__(self) -> None:
        self._waiting = RescoredQueue()
        self._first: Request | None = None
        self._num_steps = 0

    def make_queue(self) -> RequestQueue:
        return self._waiting

    def take_turns(self, turns: Turns) -> None:
        turns.serve_running()
        if len(self._waiting) > 1 and turns.may_admit:
            self._num_steps += 1
            if self._waiting.peek() is not self._first or self._num_steps >= STEPS_PER_RESCORING:
                now, self._num_steps = self.clock(), 0
                self._waiting.rescore(lambda request: _rank(request, turns, now), MOST_RESCORED)
                self._first = self._waiting.peek()
        turns.admit_waiting()


def _rank(request: Request, turns: Turns, now: float) -> tuple[bool, float, int]:
    """Highest first. now: of the policy's clock [seconds]."""
    if request.status is RequestStatus.PREEMPTED:
        return True, 0.0, 0
    num_tokens = max(MIN_COST, request.num_tokens - turns.cached_tokens(request))
    waited = max(0.0, now - request.engine_request.arrival_time)
    return False, waited / num_tokens, -num_tokens
