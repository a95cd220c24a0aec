"""The scheduler over arrivals, step by step, without a model: every request that has caught up gets a token.

What the scheduler decides does not depend on which tokens come out, so it needs neither a model nor a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from minivllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.tier import SimulatedTier


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step ``step``.
    prompt: its token ids, or a length of which nothing is shared."""

    name: str
    prompt: int | Sequence[int]
    max_tokens: int
    step: int = 0
    priority: int = 0

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
                priority=self.priority,
                cache_salt=None if shared else self.name,
            )
        )


@dataclass(frozen=True)
class TraceStep:
    """One decision of the scheduler.

    Of a pipeline it is a tick, in which every stage computes one step. A step is called by the tick in which
    the first stage computes it; finished are the requests that the last stage ends in this tick.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    decoding: frozenset[str]
    """Requests that computed only the token sampled just before."""
    preempted: list[str]
    finished: list[str]
    loading: Sequence[str] = ()
    """Requests that wait for keys and values from another tier."""
    stages: Sequence[int | None] = ()
    """The steps that the stages of a pipeline compute; None for a bubble."""
    answered: Sequence[str] = ()
    """Requests that get a token from this step."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def as_dict(self) -> dict[str, Any]:
        """The JSON line: "stages", "preempted", "loading" and "finished" only where there are any."""
        line: dict[str, Any] = {"step": self.step, "num_scheduled_tokens": self.num_scheduled_tokens}
        if self.stages:
            line["stages"] = list(self.stages)
        if self.preempted:
            line["preempted"] = self.preempted
        if self.loading:
            line["loading"] = list(self.loading)
        if self.finished:
            line["finished"] = self.finished
        return line


def made_up_output(
    scheduler: Scheduler, step: SchedulerOutput, token: Callable[[Request], int] = lambda request: 0
) -> ModelRunnerOutput:
    """Results of a step that was just scheduled:
    a token for every request of which it computes the last one known."""
    sampled = {}
    for request_id in step.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        if request.num_computed_tokens == request.num_tokens:
            sampled[request_id] = [token(request)]
    return ModelRunnerOutput(sampled_token_ids=sampled)


class _InStages(NamedTuple):
    """A step on its way through a pipeline, and what its last stage will have sampled."""

    step: int
    output: SchedulerOutput
    sampled: ModelRunnerOutput


def scheduled_steps(
    scheduler: Scheduler, arrivals: Iterable[Arrival], num_stages: int = 1, tier: SimulatedTier | None = None
) -> Iterator[TraceStep]:
    """Schedule until all requests are done; step 0 is the first step of this call.
    tier: the scheduler's connector."""
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.step))
    caught_up: set[str] = set()
    in_stages: deque[_InStages | None] = deque([None] * (num_stages - 1))
    number = 0

    def clock() -> float:
        return float(number)

    scheduler.policy.clock = clock
    for pool in scheduler.kv_cache_manager.pools:
        pool.clock = clock
    for number in count():
        if not coming and not scheduler.has_unfinished_requests():
            return
        while coming and coming[0].step <= number:
            scheduler.add_request(coming.popleft().request())
        if tier is not None:
            tier.bring(scheduler, number)
        output = scheduler.schedule()
        caught_up.difference_update(output.preempted_request_ids)
        decoding = frozenset(caught_up.intersection(output.num_scheduled_tokens))
        sampled = made_up_output(scheduler, output)
        caught_up.update(sampled.sampled_token_ids)
        results = []
        if num_stages > 1 and not output.num_scheduled_tokens:  # no stage computes that: a bubble enters
            results = scheduler.update_from_output(output, sampled)
            in_stages.append(None)
        else:
            in_stages.append(_InStages(number, output, sampled))
        stages = [None if inside is None else inside.step for inside in reversed(in_stages)]
        leaving = in_stages.popleft()
        if leaving is not None:
            results += scheduler.update_from_output(leaving.output, leaving.sampled)
        yield TraceStep(
            number,
            output.num_scheduled_tokens,
            decoding,
            output.preempted_request_ids,
            finished=[result.request_id for result in results if result.finish_reason is not None],
            loading=sorted(scheduler.loads.waiting),
            stages=stages if num_stages > 1 else (),
            answered=list(sampled.sampled_token_ids),
        )


def run(scheduler: Scheduler, arrivals: Iterable[Arrival]) -> list[TraceStep]:
    """All steps until all requests are done."""
    return list(scheduled_steps(scheduler, arrivals))
