"""Both queues against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.request import Request
from minivllm.scheduler.policy import make_policy
from tests.scheduler.simulated_worker import make_engine_request

pytestmark = pytest.mark.smoke

operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "prepend", "pop", "remove"]), st.integers(0, 2), st.integers(0, 2)
    ),
    max_size=30,
)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "response-ratio"])
@given(operations)
def test_a_queue_keeps_the_order_of_its_policy(policy: str, operations: list[tuple[str, int, int]]) -> None:
    queue = make_policy(policy).make_queue()
    reference: list[Request] = []
    for number, (name, priority, arrival) in enumerate(operations):
        request = Request(
            make_engine_request(f"r{number}", [1], priority=priority, arrival_time=float(arrival))
        )
        if name in ("add", "prepend"):
            getattr(queue, name)(request)
            reference.insert(0 if name == "prepend" else len(reference), request)
            if policy == "priority":
                reference.sort(
                    key=lambda entry: (entry.engine_request.priority, entry.engine_request.arrival_time)
                )
        elif reference and name == "pop":
            assert queue.peek() is reference[0]
            assert queue.pop() is reference.pop(0)
        elif reference:
            queue.remove(reference.pop(priority % len(reference)))
        assert list(queue) == reference and len(queue) == len(reference)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "response-ratio"])
def test_an_empty_queue_has_no_next_request(policy: str) -> None:
    queue = make_policy(policy).make_queue()
    assert not queue
    for take in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            take()
    with pytest.raises(ValueError):
        queue.remove(Request(make_engine_request("r", [1])))
