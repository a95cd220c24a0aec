"""One step on its way: while it is planned, and while its results are awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minivllm.messages import BlockCopy, CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.request import Request


class StepPlan:
    """A step while it is being put together: all of it can be taken back until it is sent.

    budget: tokens that may still be added; chunk_budget: of requests that get more than one. block_copies: of
    requests that are admitted. None of these is taken back, since a step that admits preempts none.
    """

    __slots__ = (
        "block_copies",
        "budget",
        "chunk_budget",
        "differences",
        "drafts",
        "new_requests",
        "num_scheduled_tokens",
        "preempted",
        "requests",
    )

    def __init__(self, budget: int, chunk_budget: int) -> None:
        self.budget = budget
        self.chunk_budget = chunk_budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.requests: list[Request] = []
        self.new_requests: list[NewRequestData] = []
        self.differences: dict[str, CachedRequestData] = {}
        self.drafts: dict[str, list[int]] = {}
        self.preempted: list[str] = []
        self.block_copies: list[BlockCopy] = []

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.requests.append(request)
        self.budget -= num_tokens
        self.chunk_budget -= num_tokens if num_tokens > 1 else 0

    def take_back(self, request: Request) -> None:
        """Undo ``add``, if it happened."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, None)
        if num_tokens is not None:
            self.requests.remove(request)
            self.budget += num_tokens
            self.chunk_budget += num_tokens if num_tokens > 1 else 0
            self.differences.pop(request.request_id, None)
            self.drafts.pop(request.request_id, None)


class StepTurns:
    """What a policy may do with a step; see policy.Turns.

    serve_running, admit_waiting: add requests to the plan. cached_tokens: see KVCacheManager. has_seats:
    whether fewer requests run than may.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        serve_running: Callable[[StepPlan], None],
        admit_waiting: Callable[[StepPlan], None],
        cached_tokens: Callable[[Request], int],
        has_seats: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._serve_running = serve_running
        self._admit_waiting = admit_waiting
        self._has_seats = has_seats
        self.cached_tokens = cached_tokens

    @property
    def num_scheduled_requests(self) -> int:
        return len(self._plan.requests)

    @property
    def may_admit(self) -> bool:
        return (
            not self._plan.preempted
            and min(self._plan.budget, self._plan.chunk_budget) > 0
            and self._has_seats()
        )

    def serve_running(self) -> None:
        self._serve_running(self._plan)

    def admit_waiting(self) -> None:
        if not self._plan.preempted:
            self._admit_waiting(self._plan)


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent and whose results have not come yet.

    requests: in the order of ``output.num_scheduled_tokens``. unfinished_prompts: ids for which no token is
    sampled, because known tokens remain to be computed. prompt_logprob_starts: position before the first
    prompt
    logprobs of the step, for requests that want some.
    """

    output: SchedulerOutput
    requests: list[Request]
    unfinished_prompts: set[str]
    prompt_logprob_starts: dict[str, int]
