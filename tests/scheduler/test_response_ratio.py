"""The response ratio: its order against brute force, and what it gives on simulated time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.requests.workloads import arrive, make_workload
from minivllm.bench.sides.drive import Task
from minivllm.bench.simulation.cluster import Cluster, Outcome, run_cluster
from minivllm.bench.simulation.step_time import StepTime
from minivllm.config import SchedulerConfig
from minivllm.data_parallel.policy import RoundRobin
from minivllm.kv_cache.group_manager import (
    FullAttentionManager,
    SingleGroupManager,
    SlidingWindowManager,
    StateManager,
)
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.request import Request, RequestStatus
from minivllm.scheduler.policy import make_policy
from minivllm.scheduler.response_ratio import MIN_COST, MOST_RESCORED, STEPS_PER_RESCORING, ByResponseRatio
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, made_up_output, run
from tests.scheduler.simulated_worker import make_engine_request

PREFIX, SUFFIX, ANSWER, BLOCK, SEATS = 1024, 64, 16, 16, 8
TIME = StepTime(base=0.02, prompt_token=0.001, decode=0.001)


@cache
def outcome(policy: str, families: int, requests: int, rate: float, seed: int) -> Outcome:
    """Simulated time; the cache has room for the prefixes of 5 families besides what runs."""
    num_blocks = 1 + 5 * PREFIX // BLOCK + SEATS * ((SUFFIX + ANSWER) // BLOCK + 1)
    limits = SchedulerConfig(
        max_num_seqs=SEATS, max_num_batched_tokens=512, max_model_len=2048, policy=policy
    )
    cluster = Cluster(
        num_engines=1, step_time=TIME, scheduler=limits, block_size=BLOCK, num_blocks=num_blocks
    )
    return run_cluster(cluster, RoundRobin(), tasks(families, requests, rate, seed))


def tasks(families: int, requests: int, rate: float, seed: int) -> list[Task]:
    workload = make_workload(f"prefix-groups:{families}:{requests}:{PREFIX}:{SUFFIX}:{ANSWER}", 2**31, seed)
    return arrive(workload, f"poisson:{rate}", seed)


def first_token_seconds(found: Outcome) -> list[float]:
    return [record.times[0] - record.arrival for record in found.records]


def worst_cold_slowdown(found: Outcome) -> float:
    """Of requests that found nothing in the cache:
    the time to their first token, over that on an idle engine."""
    alone = 3 * TIME.base + (PREFIX + SUFFIX) * TIME.prompt_token
    waits = [seconds / alone for seconds, hits in zip(first_token_seconds(found), found.found) if hits == 0]
    assert waits
    return max(waits)


more_seeds = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)


@more_seeds
@pytest.mark.parametrize("rate", [pytest.param(2.0, marks=pytest.mark.slow), 5.0])
def test_a_thousand_requests_in_twenty_families_find_more_and_wait_less(rate: float, seed: int) -> None:
    fair, by_ratio = (outcome(policy, 20, 50, rate, seed) for policy in ("fcfs", "response-ratio"))
    assert by_ratio.hits >= 1.5 * fair.hits
    assert mean(first_token_seconds(by_ratio)) <= 0.6 * mean(first_token_seconds(fair))
    assert worst_cold_slowdown(by_ratio) <= 1.5 * worst_cold_slowdown(fair)


@more_seeds
def test_an_engine_that_keeps_up_loses_nothing(seed: int) -> None:
    fair, by_ratio = (outcome(policy, 20, 50, 0.9, seed) for policy in ("fcfs", "response-ratio"))
    assert by_ratio.hits >= fair.hits
    assert mean(first_token_seconds(by_ratio)) <= mean(first_token_seconds(fair))
    assert worst_cold_slowdown(by_ratio) <= 1.5 * worst_cold_slowdown(fair)


@pytest.mark.parametrize("rate", [3.0, 50.0])
def test_one_family_is_served_in_the_order_of_fcfs(rate: float) -> None:
    fair, by_ratio = (outcome(policy, 1, 300, rate, 0) for policy in ("fcfs", "response-ratio"))
    assert [record.times for record in by_ratio.records] == [record.times for record in fair.records]


def test_a_cached_request_overtakes_and_a_cold_one_does_not_starve() -> None:
    """One seat, ten requests that wait, and one every two steps, which is what the engine can serve: the
    queue never ends, so the lowest cost first would serve the cold request last of all."""
    manager = KVCacheManager([FullAttentionManager(400, 4)], max_model_len=400)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_model_len=400, policy="response-ratio"), manager
    )
    came = {f"hot {n}": max(0, 2 * (n - 10)) for n in range(100)}
    hot = [Arrival(name, [*[1] * 40, 10 + n], 2, step) for n, (name, step) in enumerate(came.items())]
    steps = run(scheduler, [*hot, Arrival("cold", [2] * 3 * MIN_COST, 2, step=4)])
    served: dict[str, int] = {}
    for step in steps:
        for name in step.num_scheduled_tokens:
            served.setdefault(name, step.step)
    order = list(served)
    overtakes = [name for name in order[: order.index("cold")] if came[name] > 4]
    assert 10 <= len(overtakes) <= 40
    longest_wait = max(served[name] - step for name, step in came.items())
    assert served["cold"] - 4 <= 3 * longest_wait + 2


class _Step:
    """What a policy is given; notes the order in which the queue stands when requests are admitted."""

    num_scheduled_requests, may_admit = 0, True

    def __init__(self, queue: Any, cached: dict[str, int]) -> None:
        self._queue, self._cached = queue, cached
        self.order: list[str] = []

    def serve_running(self) -> None:
        pass

    def cached_tokens(self, request: Request) -> int:
        return self._cached[request.request_id]

    def admit_waiting(self) -> None:
        self.order = [request.request_id for request in self._queue]


def by_brute_force(waiting: Sequence[Request], cached: dict[str, int], now: float, rate: float) -> list[str]:
    """(waited + cost) / cost, preempted ones first, the longest queue's end as it was."""

    def key(place: int) -> tuple[bool, float, int, int]:
        request = waiting[place]
        num_tokens = max(MIN_COST, request.num_tokens - cached[request.request_id])
        cost = num_tokens / rate
        ratio = (now - request.engine_request.arrival_time + cost) / cost
        return request.status is not RequestStatus.PREEMPTED, -round(ratio, 9), num_tokens, place

    first = [place for place in range(min(len(waiting), MOST_RESCORED))]
    preempted = [place for place in first if waiting[place].status is RequestStatus.PREEMPTED]
    others = sorted((place for place in first if place not in preempted), key=key)
    rest = range(len(first), len(waiting))
    return [waiting[place].request_id for place in (*preempted, *others, *rest)]


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 300), st.floats(0, 1), st.integers(0, 50), st.booleans()), max_size=140
    ),
    rate=st.sampled_from([1.0, 64.0, 1024.0]),
)
def test_the_order_is_that_of_the_ratio_whatever_the_rate(requests: list[Any], rate: float) -> None:
    policy = make_policy("response-ratio")
    assert isinstance(policy, ByResponseRatio)
    queue, cached, waiting = policy.make_queue(), {}, []
    for number, (length, share, arrival, is_preempted) in enumerate(requests):
        request = Request(make_engine_request(f"r{number}", [1] * length, arrival_time=float(arrival)))
        request.status = RequestStatus.PREEMPTED if is_preempted else RequestStatus.WAITING
        cached[request.request_id] = min(length - 1, int(share * length))
        queue.add(request)
        waiting.append(request)
    policy.clock = lambda: 50.0
    step = _Step(queue, cached)
    policy.take_turns(step)
    assert step.order == by_brute_force(waiting, cached, 50.0, rate)


def test_while_the_first_request_waits_for_memory_the_others_are_compared_now_and_then() -> None:
    policy, times = ByResponseRatio(), []
    queue = policy.make_queue()
    policy.clock = lambda: times.append(0.0) or 50.0  # type: ignore[func-returns-value]
    for number in range(3):
        queue.add(Request(make_engine_request(f"r{number}", [1] * 100, arrival_time=float(number))))
    step = _Step(queue, dict.fromkeys(("r0", "r1", "r2", "r3"), 0))
    for _ in range(3 * STEPS_PER_RESCORING + 1):
        policy.take_turns(step)
    assert len(times) == 1 + 3
    queue.prepend(Request(make_engine_request("r3", [1] * 100)))
    policy.take_turns(step)
    assert len(times) == 1 + 3 + 1, "another one is the first: at once"


def groups(kind: str) -> list[SingleGroupManager]:
    full = FullAttentionManager(28, 4)
    if kind == "full":
        return [full]
    if kind == "two sizes":
        return [full, FullAttentionManager(16, 8)]
    if kind == "window":
        return [SlidingWindowManager(28, 4, 8, 16)]
    return [full, SlidingWindowManager(28, 4, 8, 16) if kind == "hybrid" else StateManager(8, 4)]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["full", "two sizes", "window", "hybrid", "state"]),
    policy=st.sampled_from(["fcfs", "response-ratio"]),
)
def test_few_look_ups_find_as_much_as_all_of_them(seed: int, kind: str, policy: str) -> None:
    """While random requests of three families come, grow, are preempted, aborted, and evict one another."""
    rng = random.Random(seed)
    manager = KVCacheManager(groups(kind), max_model_len=64)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=rng.choice([8, 16]), max_model_len=64, policy=policy
    )
    scheduler = Scheduler(config, manager)
    families = [[family + 1] * 24 for family in range(3)]
    num_found = 0
    for number in range(120):
        if rng.random() < 0.4 and len(scheduler.requests) < 12:
            prompt = rng.choice(families)[: rng.randint(1, 24)] + [rng.randint(4, 9)] * rng.randint(0, 8)
            scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, rng.randint(1, 12))))
        if scheduler.requests and rng.random() < 0.05:
            scheduler.abort_requests([rng.choice(list(scheduler.requests))])
        for request in scheduler.waiting:
            found = manager.num_cached_tokens(request)
            assert found == manager.get_computed_blocks(request)[1]
            num_found += found
        step = scheduler.schedule()
        scheduler.update_from_output(
            step, made_up_output(scheduler, step, lambda request: request.num_tokens % 5)
        )
        scheduler.check_integrity()
