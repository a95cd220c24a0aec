"""Requests are shared out among the steps in flight,
so that all stages of a pipeline have something to compute."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import SchedulerOutput
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import SimulatedWorker, make_engine_request


class Pipeline:
    """A scheduler before stages that take one tick each: a step enters in every tick in which one can be had.
    With async scheduling, results are heard of a tick too late for the next step of their requests."""

    def __init__(
        self, num_stages: int, *, throttled: bool = True, is_async: bool = False, budget: int = 64
    ) -> None:
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": budget, "max_model_len": 256}
        config = SchedulerConfig(**limits, num_stages=num_stages if throttled else 1)
        manager = KVCacheManager(
            [FullAttentionManager(400, 4)], max_model_len=256, enable_prefix_caching=False
        )
        self.scheduler = Scheduler(config, manager, async_scheduling=is_async)
        self.worker = SimulatedWorker(4, 16)
        self._stages: deque[SchedulerOutput | None] = deque([None] * (num_stages - 1 + is_async))

    def add(self, name: str, prompt: int = 1, max_tokens: int = 40) -> None:
        self.scheduler.add_request(Request(make_engine_request(name, [1] * prompt, max_tokens)))

    def tick(self) -> dict[str, int]:
        """The step that enters the first stage; {} for a bubble."""
        step = self.scheduler.schedule()
        self._stages.append(step if step.num_scheduled_tokens else None)
        if not step.num_scheduled_tokens:
            self.scheduler.update_from_output(step, self.worker.execute(step))
        left = self._stages.popleft()
        if left is not None:
            self.scheduler.update_from_output(left, self.worker.execute(left))
        return step.num_scheduled_tokens


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_requests", [4, 5, 6, 7, 10])
def test_decodes_keep_all_stages_busy(num_requests: int, num_stages: int, is_async: bool) -> None:
    pipeline = Pipeline(num_stages, is_async=is_async)
    for index in range(num_requests):
        pipeline.add(f"r{index}")
    for _ in range(3 * num_stages):  # all of them enter in one step, and then part
        pipeline.tick()
    steps = [pipeline.tick() for _ in range(4 * num_stages)]
    sizes = [len(step) for step in steps]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    for first in range(len(steps) - num_stages):
        names = [name for step in steps[first : first + num_stages] for name in step]
        assert sorted(names) == sorted(set(names)), "nobody is in two steps that compute at the same time"
    for step, later in zip(steps, steps[num_stages:]):
        assert step.keys() == later.keys()


def test_without_a_throttle_all_stages_but_one_are_idle() -> None:
    """The reason for the throttle: the same load, taken in the order of arrival."""
    pipeline = Pipeline(3, throttled=False)
    for index in range(10):
        pipeline.add(f"r{index}")
    sizes = [len(pipeline.tick()) for _ in range(12)]
    assert sorted(sizes) == [0] * 8 + [10] * 4


def test_one_stage_is_not_throttled() -> None:
    pipeline = Pipeline(1, budget=64)
    for index in range(10):
        pipeline.add(f"r{index}", prompt=20)
    assert sum(pipeline.tick().values()) == 64


def test_a_long_prompt_passes_through_the_stages_in_chunks() -> None:
    pipeline = Pipeline(2, budget=64)
    pipeline.add("decoding")
    pipeline.tick()
    pipeline.add("long", prompt=150)
    steps = [pipeline.tick() for _ in range(5)]
    assert [step["long"] for step in steps] == [32, 32, 32, 32, 22]
    assert ["decoding" in step for step in steps] == [False, True, False, True, False]


@given(
    num_stages=st.integers(1, 4),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budget=st.integers(4, 64),
    is_async=st.booleans(),
)
def test_everybody_is_served_whatever_the_share(
    num_stages: int, prompts: list[int], budget: int, is_async: bool
) -> None:
    pipeline = Pipeline(num_stages, is_async=is_async, budget=budget)
    for index, prompt in enumerate(prompts):
        pipeline.add(f"r{index}", prompt, max_tokens=4)
    most = -(-budget // num_stages)
    for _ in range(600):
        chunks = [count for count in pipeline.tick().values() if count > 1]
        assert sum(chunks) <= most
        if not pipeline.scheduler.has_unfinished_requests():
            break
    assert not pipeline.scheduler.has_unfinished_requests()
