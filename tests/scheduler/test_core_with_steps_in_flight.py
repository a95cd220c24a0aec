"""Async scheduling in the engine core:
the next step is scheduled while the last one runs, with the same outputs.

The workers are simulated ones in a thread; they check every block table they are given as they go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, EngineConfig, SchedulerConfig
from minivllm.engine.administration import Administration
from minivllm.engine.core import EngineCore
from minivllm.errors import RequestError
from minivllm.messages import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from minivllm.simulation.executor import SimulatedExecutor, simulated_config
from tests.scheduler.simulated_worker import (
    VOCAB_SIZE,
    SimulatedWorker,
    make_engine_request,
    reference_generation,
)

MAX_MODEL_LEN = 16
BLOCK_SIZE = 2


class ThreadedExecutor(SimulatedExecutor):
    """Runs steps in order in a thread. before_step is called there with the number of each step, from 0."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.worker = SimulatedWorker(BLOCK_SIZE, config.scheduler.max_num_seqs)
        super().__init__(config, self.worker.execute, num_blocks, VOCAB_SIZE)
        self.steps: list[SchedulerOutput] = []
        self.before_step: Callable[[int], None] = lambda index: None
        self._thread = ThreadPoolExecutor(1)

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> Future[ModelRunnerOutput]:
        assert not step.is_empty
        self.steps.append(step)
        return self._thread.submit(self._run_step, len(self.steps) - 1, step)

    def _run_step(self, index: int, step: SchedulerOutput) -> ModelRunnerOutput:
        self.before_step(index)
        return self.worker.execute(step)

    def collective(self, method: str, *args: Any) -> list[Any]:
        super().collective(method, *args)
        return [self._thread.submit(lambda: self.worker.num_steps).result()]

    def shutdown(self) -> None:
        self._thread.shutdown()


def make_core(
    is_async: bool = True,
    *,
    budget: int = 16,
    num_blocks: int = 40,
    max_num_seqs: int = 4,
    caching: bool = True,
    policy: str = "fcfs",
    num_stages: int = 1,
) -> tuple[EngineCore, ThreadedExecutor]:
    config = simulated_config(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,  # type: ignore[arg-type]
            num_stages=num_stages,
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        async_scheduling=is_async,
        pipeline_parallel_size=num_stages,
    )
    executor = ThreadedExecutor(config, num_blocks)
    return EngineCore(config, executor), executor


def run_dry(core: EngineCore, received: dict[str, list[EngineOutput]]) -> None:
    """Step until no request waits, and then until nothing is left to do."""
    for _ in range(1000):
        if not core.has_work():
            return
        take(core.step(), received)
    raise AssertionError("the engine core does not come to rest")


def take(outputs: Sequence[EngineOutput], received: dict[str, list[EngineOutput]]) -> None:
    for output in outputs:
        received.setdefault(output.request_id, []).append(output)


def assert_answer(request: EngineRequest, outputs: Sequence[EngineOutput]) -> None:
    tokens, reason, stop_reason = reference_generation(request, MAX_MODEL_LEN)
    assert [token for output in outputs for token in output.new_token_ids] == tokens
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
    assert outputs[-1].stop_reason == stop_reason


def num_computed(executor: ThreadedExecutor, request_id: str) -> int:
    """Tokens that the workers were told to compute for a request."""
    return sum(step.num_scheduled_tokens.get(request_id, 0) for step in executor.steps)


def test_the_next_step_is_scheduled_while_the_last_one_runs() -> None:
    core, executor = make_core()
    scheduled: list[threading.Event] = [threading.Event() for _ in range(20)]
    submit = executor.execute_model

    def execute_model(step: SchedulerOutput, token_masks: Any = None) -> Future[ModelRunnerOutput]:
        scheduled[len(executor.steps)].set()
        return submit(step, token_masks)

    def wait_for_the_next_one(index: int) -> None:
        # A synchronous engine would be stuck here: it waits for this step before it schedules another one.
        assert index >= 8 or scheduled[index + 1].wait(timeout=60), f"step {index + 1} was not scheduled"

    executor.execute_model = execute_model  # type: ignore[method-assign]
    executor.before_step = wait_for_the_next_one
    request = make_engine_request("r", [1, 2, 3], max_tokens=9)
    core.add_request(request)
    received: dict[str, list[EngineOutput]] = {}
    run_dry(core, received)
    assert_answer(request, received["r"])
    core.shutdown()


def test_without_async_scheduling_every_result_is_known_before_the_next_schedule() -> None:
    core, executor = make_core(is_async=False)
    core.add_request(make_engine_request("r", [1, 2, 3], max_tokens=9))
    while core.has_unfinished_requests():
        before = executor.worker.num_steps
        core.step()
        assert executor.worker.num_steps == len(executor.steps) == before + 1
    core.shutdown()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_stop_costs_one_token_and_the_length_none(is_async: bool) -> None:
    core, executor = make_core(is_async)
    endless = make_engine_request("endless", [1, 2, 3], max_tokens=8)
    tokens, _, _ = reference_generation(endless, MAX_MODEL_LEN)
    stop = next(index for index in range(2, 7) if tokens[index] not in tokens[:index])
    stopped = make_engine_request("stopped", [1, 2, 3], max_tokens=8, stop_token_ids=[tokens[stop]])
    received: dict[str, list[EngineOutput]] = {}
    for request in (endless, stopped):
        core.add_request(request)
        run_dry(core, received)
        Administration(core).reset_prefix_cache()
        assert_answer(request, received[request.request_id])
    assert num_computed(executor, "endless") == 3 + 8 - 1
    assert num_computed(executor, "stopped") == 3 + (stop + 1) - 1 + is_async
    core.shutdown()


def test_whoever_ends_leaves_at_most_one_step_behind_and_the_workers_hear_of_it_once() -> None:
    core, executor = make_core()
    received: dict[str, list[EngineOutput]] = {}
    for phase in range(8):
        executor.steps.clear()
        executor.worker.finished.clear()
        core.add_request(make_engine_request(f"r{phase}", [0, 1, phase % 5], max_tokens=12))
        for _ in range(phase):
            take(core.step(), received)
        core.abort_requests([f"r{phase}"])
        num_outputs = len(received.get(f"r{phase}", []))
        later = make_engine_request(f"later{phase}", [phase % 5, 4], max_tokens=3)
        core.add_request(later)
        run_dry(core, received)
        assert_answer(later, received[later.request_id])
        assert len(received.get(f"r{phase}", [])) == num_outputs == phase
        assert sum(f"r{phase}" in step.num_scheduled_tokens for step in executor.steps) == phase + (phase > 0)
        assert executor.worker.finished == [f"r{phase}", f"later{phase}"]
        core.scheduler.check_integrity()
    core.shutdown()


def test_a_step_that_fails_raises_where_its_result_is_awaited() -> None:
    core, executor = make_core()

    def fail(index: int) -> None:
        if index == 2:
            raise ValueError("the model has a fever")

    executor.before_step = fail
    core.add_request(make_engine_request("r", [1, 2], max_tokens=9))
    core.step()
    core.step()
    with pytest.raises(ValueError, match="fever"):
        core.step()
    core.shutdown()


def test_calls_about_the_whole_model_wait_for_steps_in_flight() -> None:
    core, executor = make_core()
    core.add_request(make_engine_request("r", [1, 2], max_tokens=9))
    core.step()
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        Administration(core).sleep()
    assert executor.calls == []
    core.abort_requests(["r"])
    assert core.has_work() and not core.has_unfinished_requests()
    Administration(core).sleep()
    assert executor.calls == [("sleep", (1,))]
    assert not core.has_work() and executor.worker.requests == {}
    core.shutdown()


ARRIVAL = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=10),
        "max_tokens": st.integers(1, 9),
        "eos_token_ids": st.sampled_from([[], [0], [1, 2]]),
        "stop_token_ids": st.sampled_from([[], [3]]),
        "min_tokens": st.integers(0, 1),
        "priority": st.integers(-1, 1),
        "arrival_time": st.integers(0, 3).map(float),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=8),
    budget=st.sampled_from([1, 2, 7, 64]),
    num_blocks=st.integers(9, 14),
    max_num_seqs=st.integers(1, 4),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "response-ratio"]),
    seed=st.integers(0, 2**16),
    num_stages=st.integers(1, 3),
    is_async=st.booleans(),
)
def test_any_life_of_many_requests_gives_every_one_what_it_would_get_alone(
    arrivals: list[dict[str, Any]],
    budget: int,
    num_blocks: int,
    max_num_seqs: int,
    caching: bool,
    policy: str,
    seed: int,
    num_stages: int,
    is_async: bool,
) -> None:
    core, executor = make_core(
        is_async,
        budget=budget,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        caching=caching,
        policy=policy,
        num_stages=num_stages,
    )
    random = Random(seed)
    given_requests: dict[str, EngineRequest] = {}
    received: dict[str, list[EngineOutput]] = {}
    aborted: set[str] = set()
    for index, arrival in enumerate(arrivals):
        request = make_engine_request(f"r{index}", **arrival)
        given_requests[request.request_id] = request
        core.add_request(request)
        for _ in range(random.randrange(4)):
            take(core.step(), received)
            core.scheduler.check_integrity()
        if random.random() < 0.2:
            victim = random.choice(list(given_requests))
            if victim in core.scheduler.requests:
                aborted.add(victim)
            core.abort_requests([victim])
    run_dry(core, received)
    core.scheduler.check_integrity()
    for request_id, request in given_requests.items():
        outputs = received.get(request_id, [])
        if request_id in aborted:
            assert all(output.finish_reason is None for output in outputs)
            continue
        assert_answer(request, outputs)
        assert outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    pool = core.scheduler.kv_cache_manager.pools[0]
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert executor.worker.requests == {}
    assert sorted(executor.worker.finished) == sorted(given_requests)
    core.shutdown()
