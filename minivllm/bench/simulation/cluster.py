"""A run of many simulated engines, event by event. Time is a number that jumps from one event to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from minivllm.bench.sides.drive import Record, Task
from minivllm.bench.simulation.step_time import StepTime
from minivllm.config import SchedulerConfig
from minivllm.data_parallel.policy import RoutingPolicy
from minivllm.data_parallel.router import Router
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import made_up_output

LOST = "EngineLostError: the engine that worked on the request died"
NOBODY = "EngineDeadError: no engine was up"


@dataclass(frozen=True)
class Failure:
    """An engine dies at a time, and serves again so many seconds later, with an empty cache."""

    engine: int
    time: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The simulated engines. num_blocks: of the KV cache of each engine, the null block included."""

    num_engines: int
    step_time: StepTime
    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    failures: Sequence[Failure] = ()


@dataclass
class Outcome:
    records: list[Record]
    seconds: float = 0.0
    """Until the last event of a request."""
    queried: int = 0
    """Prompt tokens looked up in prefix caches."""
    hits: int = 0
    """Those that were found."""
    found: list[int] = field(default_factory=list)
    """Of each request; 0 for one that failed before its first token."""
    computed: list[int] = field(default_factory=list)
    """Tokens that each engine computed."""

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queried if self.queried else 0.0


class SimulatedEngine:
    """The scheduler and the KV cache of an engine, and a worker that makes up the tokens.

    clock: the simulated time [seconds].
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        blocks = FullAttentionManager(cluster.num_blocks, cluster.block_size)
        self.scheduler = Scheduler(
            cluster.scheduler, KVCacheManager([blocks], cluster.scheduler.max_model_len)
        )
        self.scheduler.policy.clock = clock
        self._step_time = cluster.step_time
        self._running: tuple[SchedulerOutput, ModelRunnerOutput] | None = None

    @property
    def has_work(self) -> bool:
        return self._running is not None or self.scheduler.has_requests()

    @property
    def is_idle(self) -> bool:
        return self._running is None and self.has_work

    def start_step(self, busy: float) -> float:
        """Decide on a step; how long it takes [seconds]. busy: share of the other engines that have work."""
        step = self.scheduler.schedule()
        self._running = step, made_up_output(self.scheduler, step, lambda request: request.num_tokens % 1009)
        num_decodes = sum(
            count == 1 and self.scheduler.requests[request_id].num_output_tokens > 0
            for request_id, count in step.num_scheduled_tokens.items()
        )
        num_tokens = step.total_num_scheduled_tokens
        return self._step_time.seconds(num_tokens - num_decodes, num_decodes, busy) if num_tokens else 0.0

    def end_step(self) -> list[EngineOutput]:
        """End the running step. Returns its outputs."""
        if self._running is None:
            raise RuntimeError("No step is running.")
        (step, output), self._running = self._running, None
        return self.scheduler.update_from_output(step, output)


class _Run:
    """One run, see ``run_cluster``. Events of one time happen in the order in which they were planned."""

    def __init__(self, cluster: Cluster, policy: RoutingPolicy, tasks: Sequence[Task]) -> None:
        self._cluster = cluster
        self._tasks = tasks
        num_tokens = (cluster.num_blocks - 1) * cluster.block_size
        self._router = Router(policy, cluster.num_engines, cluster.block_size, num_tokens)
        self._lives = [0] * cluster.num_engines
        self._starting: set[tuple[int, int]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._engines = [SimulatedEngine(cluster, self._clock) for _ in range(cluster.num_engines)]
        self._num_left = len(tasks)
        self._followers: dict[int, list[int]] = {}
        self.outcome = Outcome(
            [Record() for _ in tasks], found=[0] * len(tasks), computed=[0] * cluster.num_engines
        )
        for failure in cluster.failures:
            self._plan(failure.time, partial(self._fail, failure))
        for index, task in enumerate(tasks):
            if task.after is None:
                self._plan(task.arrival, partial(self._arrive, index))
            else:
                self._followers.setdefault(task.after, []).append(index)

    def run(self) -> Outcome:
        while self._events and self._num_left:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        for index in range(len(self._engines)):
            self._count(index)
        return self.outcome

    def _clock(self) -> float:
        return self._now

    def _plan(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _arrive(self, index: int) -> None:
        task, record = self._tasks[index], self.outcome.records[index]
        record.arrival = self._now
        if not self._router.up:
            self._finish(index, NOBODY)
            return
        request = EngineRequest(
            request_id=str(index),
            prompt_token_ids=task.prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True),
            max_tokens=task.max_tokens,
            seed=0,
            arrival_time=self._now,
        )
        engine = self._router.add(request)
        self._engines[engine].scheduler.add_request(Request(request))
        # Requests of one moment are in the same step:
        # the engine looks at all that have arrived before it decides.
        start = engine, self._lives[engine]
        if start not in self._starting:
            self._starting.add(start)
            self._plan(self._now, partial(self._start, *start))

    def _start(self, index: int, life: int) -> None:
        self._starting.remove((index, life))
        if life == self._lives[index]:
            self._work(index)

    def _work(self, index: int) -> None:
        engine, life = self._engines[index], self._lives[index]
        if engine.is_idle:
            others = [other for other in self._engines if other is not engine]
            busy = sum(other.has_work for other in others) / max(1, len(others))
            self._plan(self._now + engine.start_step(busy), partial(self._end_step, index, life))

    def _end_step(self, index: int, life: int) -> None:
        if life != self._lives[index]:
            return  # it died meanwhile
        outputs = self._engines[index].end_step()
        self._router.take_in(outputs)
        for output in outputs:
            number = int(output.request_id)
            record = self.outcome.records[number]
            if output.new_token_ids and not record.times:
                self.outcome.found[number] = output.num_cached_tokens
            record.token_ids += output.new_token_ids
            record.times += [self._now] * len(output.new_token_ids)
            if output.finish_reason is not None:
                self._finish(number, None if output.error is None else f"EngineError: {output.error}")
        self._work(index)

    def _finish(self, index: int, error: str | None) -> None:
        self.outcome.records[index].error = error
        self.outcome.seconds = self._now
        self._num_left -= 1
        for follower in self._followers.get(index, ()):
            self._plan(self._now + self._tasks[follower].arrival, partial(self._arrive, follower))

    def _fail(self, failure: Failure) -> None:
        index = failure.engine
        if not self._router.engines[index].is_up:
            return
        self._count(index)
        self._lives[index] += 1
        self._engines[index] = SimulatedEngine(self._cluster, self._clock)
        for request_id in self._router.lose(index):
            self._finish(int(request_id), LOST)
        self._plan(self._now + failure.seconds, partial(self._return, index))

    def _return(self, index: int) -> None:
        self._router.engines[index].is_up = True

    def _count(self, index: int) -> None:
        """Add up what an engine has counted in this life."""
        stats = self._engines[index].scheduler.stats()
        self.outcome.queried += stats.prefix_cache_queried_tokens
        self.outcome.hits += stats.prefix_cache_hit_tokens
        self.outcome.computed[index] += stats.num_computed_tokens


def run_cluster(cluster: Cluster, policy: RoutingPolicy, tasks: Sequence[Task]) -> Outcome:
    """Send all tasks to simulated engines, each when it is due, and wait for the last one."""
    return _Run(cluster, policy, tasks).run()
