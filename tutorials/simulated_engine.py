"""The real scheduler and KV cache over a worker without a model: every request that caught up gets token 0.

What the scheduler decides does not depend on which tokens come out, so its chapters need no model and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minivllm.messages import EngineRequest, ModelRunnerOutput
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step ``step``. prompt: its token ids, or a length of which nothing is shared."""

    name: str
    prompt: int | Sequence[int]
    max_tokens: int
    step: int = 0

    def request(self) -> Request:
        shared = not isinstance(self.prompt, int)
        return Request(
            EngineRequest(
                request_id=self.name,
                prompt_token_ids=[0] * self.prompt if isinstance(self.prompt, int) else list(self.prompt),
                sampling_params=SamplingParams(),
                max_tokens=self.max_tokens,
                seed=0,
                arrival_time=float(self.step),
                cache_salt=None if shared else self.name,
            )
        )


@dataclass(frozen=True)
class Step:
    """scheduled: tokens by request. answered: who got a token. preempted, finished: who left, and how."""

    scheduled: dict[str, int]
    answered: list[str]
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.scheduled.values())


def run(scheduler: Scheduler, arrivals: Iterable[Arrival]) -> list[Step]:
    """Schedule until all requests are done; step 0 is the first step of this call."""
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.step))
    steps: list[Step] = []
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0].step <= len(steps):
            scheduler.add_request(coming.popleft().request())
        steps.append(run_step(scheduler))
    return steps


def run_step(scheduler: Scheduler) -> Step:
    """One step."""
    plan = scheduler.schedule()
    answered = [
        name
        for name in plan.num_scheduled_tokens
        if scheduler.requests[name].num_computed_tokens == scheduler.requests[name].num_tokens
    ]
    results = ModelRunnerOutput(sampled_token_ids={name: [0] for name in answered})
    outputs = scheduler.update_from_output(plan, results)
    finished = [output.request_id for output in outputs if output.finish_reason is not None]
    return Step(plan.num_scheduled_tokens, answered, plan.preempted_request_ids, finished)
