"""What a policy may do with a step that is being planned."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.request import Request
from minivllm.scheduler.step_plan import StepPlan


class StepTurns:
    """One step; see policy.Turns.

    serve_running, admit_waiting: add requests to the plan. cached_tokens: see KVCacheManager. has_seats: whether fewer
    requests run than may.
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
        self._serve_running, self._admit_waiting = serve_running, admit_waiting
        self._has_seats = has_seats
        self.cached_tokens = cached_tokens

    @property
    def num_scheduled_requests(self) -> int:
        return len(self._plan.requests)

    @property
    def may_admit(self) -> bool:
        return not self._plan.preempted and min(self._plan.budget, self._plan.chunk_budget) > 0 and self._has_seats()

    def serve_running(self) -> None:
        self._serve_running(self._plan)

    def admit_waiting(self) -> None:
        if not self._plan.preempted:
            self._admit_waiting(self._plan)
