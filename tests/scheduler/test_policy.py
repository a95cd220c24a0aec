"""Policies: built in, registered, or named by import path, in every order of turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import EngineArgs, SchedulingPolicy, SortedQueue, register_policy
from minivllm.config import SchedulerConfig
from minivllm.errors import ConfigError
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.plugins.points import POLICIES
from minivllm.request import Request
from minivllm.scheduler.policy import Turns, make_policy
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import SimulatedWorker, make_engine_request, reference_generation

BLOCK_SIZE, MAX_MODEL_LEN = 4, 64


class ShortestFirst(SchedulingPolicy):
    """The shortest waiting request is the next; the longest gives way."""

    def make_queue(self) -> SortedQueue:
        return SortedQueue(lambda request: request.num_tokens)

    def choose_victim(self, running: list[Request]) -> int:  # type: ignore[override]
        return max(range(len(running)), key=lambda place: running[place].num_tokens)


class AdmitsFirst(SchedulingPolicy):
    """Whatever a policy may try: admit, serve, admit, serve."""

    def take_turns(self, turns: Turns) -> None:
        turns.admit_waiting()
        turns.serve_running()
        turns.admit_waiting()
        turns.serve_running()


class NewcomersAlone(SchedulingPolicy):
    """A step that admits serves no other request."""

    def take_turns(self, turns: Turns) -> None:
        turns.admit_waiting()
        if turns.num_scheduled_requests == 0:
            turns.serve_running()


OWN = {"shortest_first": ShortestFirst, "admits_first": AdmitsFirst, "newcomers_alone": NewcomersAlone}
for name, policy in OWN.items():
    register_policy(name, policy)

requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 5), st.integers(-2, 2)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(
    policy=st.sampled_from([*OWN, "fcfs", "priority", "response-ratio"]),
    requests=requests,
    budget=st.integers(1, 24),
    num_blocks=st.integers(10, 24),
    max_num_seqs=st.integers(1, 5),
)
def test_every_policy_serves_every_request_what_it_would_get_alone(
    policy: str, requests: list[tuple[int, int, int, int]], budget: int, num_blocks: int, max_num_seqs: int
) -> None:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN, policy=policy
    )
    scheduler = Scheduler(
        config, KVCacheManager([FullAttentionManager(num_blocks, BLOCK_SIZE)], MAX_MODEL_LEN)
    )
    worker = SimulatedWorker(BLOCK_SIZE, max_num_seqs)
    sent = [
        make_engine_request(f"r{n}", [n] * length, max_tokens, priority=priority, arrival_time=float(step))
        for n, (length, max_tokens, step, priority) in enumerate(requests)
    ]
    answers: dict[str, list[int]] = {request.request_id: [] for request in sent}
    for number in range(500):
        for request in sent:
            if request.arrival_time == number:
                scheduler.add_request(Request(request))
        step = scheduler.schedule()
        assert sum(step.num_scheduled_tokens.values()) <= budget
        assert step.num_scheduled_tokens or (not scheduler.running and not scheduler.waiting), (
            "every step makes progress"
        )
        for output in scheduler.update_from_output(step, worker.execute(step)):
            answers[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
        if number > 5 and not scheduler.has_requests():
            break
    assert answers == {
        request.request_id: reference_generation(request, MAX_MODEL_LEN)[0] for request in sent
    }


def test_a_policy_is_found_by_its_import_path() -> None:
    assert type(make_policy("minivllm.scheduler.policy:ByPriority")).__name__ == "ByPriority"
    EngineArgs(scheduling_policy="my_module:MyPolicy")  # looked for when the engine starts


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lifo", "must be one of fcfs, priority, response-ratio"),
        ("no_such_module:Policy", "cannot be imported: No module named 'no_such_module'"),
        ("minivllm.scheduler.policy:Nobody", "cannot be imported"),
        ("minivllm.request:Request", "scheduling_policy"),
    ],
)
def test_what_is_no_policy_is_told_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_policy(name)


def test_a_name_that_is_built_in_stays_what_it_is() -> None:
    with pytest.raises(ConfigError, match="'fcfs' is built in"):
        register_policy("fcfs", ShortestFirst)
    with pytest.raises(ConfigError, match="letters, digits"):
        register_policy("not a name", ShortestFirst)


def test_another_process_is_told_the_import_path() -> None:
    assert POLICIES.portable("priority") == "priority"
    assert POLICIES.portable("shortest_first").endswith("test_policy:ShortestFirst")
    register_policy("local", type("Local", (SchedulingPolicy,), {"__module__": "__main__"}))
    with pytest.raises(ConfigError, match="put it into a module"):
        POLICIES.portable("local")
