"""The buffer between two engines under random lives:
its bound, its order, and what consumers believe of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.kv_transfer.lookup import lookup_server
from minivllm.kv_transfer.lookup.lookup_buffer import LookupBuffer
from minivllm.kv_transfer.lookup.lookup_server import PendingNews
from minivllm.kv_transfer.lookup.pipe import News
from minivllm.messages import SchedulerOutput
from tests.kv_transfer.simulated_connector import SimulatedStore, Transport
from tests.kv_transfer.test_lives_with_a_connector import ConnectorMachine, busy_life

KEYS = [bytes([number]) * 32 for number in range(12)]


def keys_of(buffer: LookupBuffer) -> set[bytes]:
    told: list[bytes] = []
    listener = lambda came, gone: told.extend(came)  # noqa: E731
    buffer.subscribe(listener)
    buffer.unsubscribe(listener)
    assert len(told) == len(set(told)) == len(buffer)
    return set(told)


@given(
    max_blocks=st.integers(1, 6),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)),
            st.tuples(st.just("take"), st.lists(st.integers(0, 11), max_size=3)),
            st.tuples(st.just("hear"), st.just([])),
        ),
        max_size=30,
    ),
)
@settings(deadline=None)
def test_a_buffer_keeps_its_bound_and_whoever_listens_knows_what_it_holds(
    max_blocks: int, actions: list[tuple[str, list[int]]]
) -> None:
    buffer, news, believed = LookupBuffer(max_blocks), PendingNews(), set[bytes]()
    contents = {key: torch.tensor([number], dtype=torch.uint8) for number, key in enumerate(KEYS)}
    buffer.subscribe(news.note)

    def hear() -> None:
        for message in news.take(0.0):
            believed.difference_update(message.gone)
            believed.update(message.came)

    for kind, numbers in actions:
        before = keys_of(buffer)
        if kind == "hear":
            hear()
        elif kind == "take":
            for number in numbers:
                found = buffer.drop_select(KEYS[number])
                assert (found is not None) == (KEYS[number] in before)
                assert found is None or found.data is contents[KEYS[number]]
        else:
            buffer.insert([(KEYS[number], contents[KEYS[number]]) for number in numbers], lambda: None, 1)
            assert len(buffer) <= max_blocks
            new = [KEYS[number] for number in numbers if KEYS[number] not in before][:max_blocks]
            assert {key for key in new if key in {KEYS[n] for n in numbers[:max_blocks]}} <= keys_of(buffer)
    hear()
    assert believed == keys_of(buffer)


def test_what_was_taken_goes_before_what_nobody_has_taken_and_older_before_newer() -> None:
    buffer, data = LookupBuffer(4), torch.zeros(1, dtype=torch.uint8)

    def insert(*numbers: int) -> set[int]:
        buffer.insert([(KEYS[number], data) for number in numbers], lambda: None, 1)
        return {key[0] for key in keys_of(buffer)}

    assert insert(0) | insert(1) | insert(2) | insert(3) == {0, 1, 2, 3}
    assert buffer.drop_select(KEYS[2]) and buffer.drop_select(KEYS[1])
    assert insert(4) == {0, 1, 3, 4} and insert(5) == {0, 3, 4, 5}
    assert insert(6) == {3, 4, 5, 6}
    assert buffer.drop_select(KEYS[3]) and buffer.holds(KEYS[3])  # computed again, so it is new again
    assert insert(7) == {3, 5, 6, 7}
    assert insert(0, 1, 2, 8, 9) == {0, 1, 2, 8}, "of a prompt that does not fit the beginning"
    assert insert(10) == {0, 1, 2, 10}


def test_what_is_larger_takes_the_room_of_several() -> None:
    """A state costs three blocks here; the bound is one for both."""
    buffer, data = LookupBuffer(7), torch.zeros(1, dtype=torch.uint8)
    for numbers, num_bytes, kept in (
        ([0, 1, 2, 3], 1, {0, 1, 2, 3}),
        ([4], 3, {0, 1, 2, 3, 4}),
        ([5], 3, {0, 4, 5}),
        ([6], 1, {4, 5, 6}),
        ([7, 8, 9], 3, {6, 7, 8}),
        ([10, 11], 1, {7, 10, 11}),
    ):
        buffer.insert([(KEYS[number], data) for number in numbers], lambda: None, num_bytes)
        assert {key[0] for key in keys_of(buffer)} == kept, numbers


def test_a_long_list_of_news_is_cut_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_server, "MAX_NEWS_KEYS", 5)
    news = PendingNews()
    news.note(KEYS, [])
    news.note([], KEYS[:2])
    messages = news.take(0.0)
    assert [len(one.came) + len(one.gone) for one in messages] == [5, 5, 2]
    assert {key for one in messages for key in one.gone} == set(KEYS[:2])
    assert news.take(0.0) == [News()], "a sign of life"


class Consumer(SimulatedStore):
    """Believes what it has heard, until a load fails."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.believed: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key in self.believed

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        self.believed.difference_update(load.keys[num_valid_blocks : num_valid_blocks + 1])


@dataclass
class ThroughBuffer(Transport):
    """What is saved goes into a buffer of a few blocks;
    what is in it is heard of one step later, or never."""

    buffer: LookupBuffer = field(default_factory=lambda: LookupBuffer(16))
    news: PendingNews = field(default_factory=PendingNews)

    def __post_init__(self) -> None:
        self.buffer.subscribe(self.news.note)

    def follow(self, step: SchedulerOutput) -> None:
        self.hear()
        super().follow(step)
        metadata = step.kv_connector_metadata
        saved: list[Any] = [(key, None) for save in (metadata.saves if metadata else ()) for key in save.keys]
        self.buffer.insert(saved, lambda: None, 1)

    def hear(self) -> None:
        assert isinstance(self.store, Consumer)
        for message in self.news.take(0.0):
            self.store.believed.difference_update(message.gone)
            self.store.believed.update(message.came)

    def carry(self, choice: int, num_good: int) -> KVConnectorOutput:
        count, load = 0, self.loads[choice % len(self.loads)]
        for key in load.keys[:num_good]:
            if self.buffer.drop_select(key) is None:
                break
            count += 1
        return super().carry(choice, count)


class LookupMachine(ConnectorMachine):
    """The machine of the connectors, with a producer's buffer in between."""

    make_store = Consumer
    make_transport = ThroughBuffer
    is_alone = True

    @rule()
    def reconnect(self) -> None:
        """The producer has another life: nothing of it is known, and then what is there now."""
        assert isinstance(self.transport, ThroughBuffer) and isinstance(self.store, Consumer)
        self.transport.news.take(0.0)
        self.store.believed = keys_of(self.transport.buffer)


TestLivesThroughABuffer = LookupMachine.TestCase
TestLivesThroughABuffer.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLivesThroughABufferLong = pytest.mark.slow(type("LongLookupMachine", (LookupMachine,), {}).TestCase)  # type: ignore[attr-defined]
TestLivesThroughABufferLong.settings = settings(
    max_examples=500, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_busy_lives_through_a_buffer_meet_hits_and_blocks_that_were_dropped() -> None:
    lives = [busy_life(seed, 300, LookupMachine) for seed in Random(0).sample(range(1000), 16)]
    assert not any(life.scheduler.has_requests() for life in lives)
    stats = [tier for life in lives for tier in life.scheduler.stats().kv_transfer]
    assert sum(one.num_loaded_blocks for one in stats) > 10
    assert sum(one.num_failed_blocks for one in stats) > 5
