"""The protocol by which engines take every step together, with made-up engines that step in any order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.distributed.lockstep import EngineSeat, Lockstep, open_seats


@contextmanager
def opened(size: int) -> Iterator[list[EngineSeat]]:
    seats = open_seats(size, 1)
    try:
        yield seats
    finally:
        seats[0].close()


class MadeUpEngine:
    """An engine whose steps end when all engines have begun them.
    requests: steps that its own requests still need."""

    def __init__(self, seat: EngineSeat) -> None:
        self.lockstep, self._bell = Lockstep(seat), seat.bells[seat.rank]
        self.requests = self.begun = self.dummies = 0
        self.in_flight = False

    def awakes(self) -> bool:
        """Whether a sleeping engine is woken: by its bell, or by a request."""
        return bool(self.requests) or self._has_rung()

    def _has_rung(self) -> bool:
        os.set_blocking(self._bell, False)
        try:
            return os.eventfd_read(self._bell) > 0
        except BlockingIOError:
            return False

    def turn(self, most: int) -> bool:
        """One turn of the busy loop; False if there is nothing to do.
        most: steps that all engines have begun."""
        if self.in_flight:
            self.in_flight = self.begun > most
            return not self.in_flight
        if not self.requests and not self.lockstep.is_behind:
            return False
        self.dummies += not self.requests
        self.requests -= bool(self.requests)
        self.lockstep.begin()
        self.begun += 1
        self.in_flight = True
        return True


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_every_engine_takes_part_in_every_step_and_none_sleeps_through_one(
    size: int, events: list[tuple[int, int]]
) -> None:
    """events: an engine, and the steps that a request needs which arrives there, or 0 for a turn of its loop,
    which may come while others go to sleep. Who sleeps goes on only when it is woken."""
    with opened(size) as seats:
        engines = [MadeUpEngine(seat) for seat in seats]
        sleeping, total = set[int](), 0

        def turn(rank: int) -> bool:
            engine = engines[rank]
            if rank in sleeping and not engine.awakes():
                return False
            sleeping.discard(rank)
            moved = engine.turn(min(other.begun for other in engines))
            if not moved and not engine.in_flight:
                sleeping.add(rank)
            return moved

        for place, steps in events:
            engines[place % size].requests += steps
            total += steps
            if steps == 0:
                turn(place % size)
        for _ in range(3 * total + 3):
            if not any([turn(rank) for rank in range(size)]):
                break
        assert sleeping == set(
            range(size)
        )  # with nothing in flight: no engine waits for one that does not join
        assert len({engine.begun for engine in engines}) == 1
        assert sum(engine.begun - engine.dummies for engine in engines) == total
        assert engines[0].begun <= total  # no engine begins a step without requests


def test_a_border_is_passed_when_all_have_come_and_no_step_is_in_flight() -> None:
    """One engine comes at once, the other after three more steps, in which the first one takes part."""
    seats = open_seats(2, 1)  # left open: both ends listen
    first, second = map(Lockstep, seats)
    events: list[str] = []
    both = threading.Barrier(2)

    def take_part() -> None:
        first.begin()
        events.append("dummy")
        both.wait(10)

    first.listen(lambda: None)
    thread = threading.Thread(target=lambda: (first.settle(take_part), events.append("passed")))
    thread.start()
    for _ in range(3):
        second.begin()
        both.wait(10)
    assert "passed" not in events
    second.settle(lambda: None)
    thread.join(10)
    assert events == ["dummy"] * 3 + ["passed"]


def test_an_engine_that_has_left_is_not_waited_for() -> None:
    seats = open_seats(2, 1)  # left open: both ends listen
    first, second = map(Lockstep, seats)
    leaving = threading.Thread(target=lambda: first.settle(lambda: None, for_good=True))
    first.listen(lambda: None)
    leaving.start()
    second.settle(lambda: None)
    assert leaving.is_alive()
    second.settle(lambda: None, for_good=True)
    leaving.join(10)
    assert not leaving.is_alive()
