"""Spans: one test and one shared object without a listener;
otherwise listeners get the spans they asked for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from minivllm.profiling.spans import listen, span, spanned


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def __call__(self, name: str, subject: object) -> Callable[[], None]:
        self.lines.append((name, subject))
        return lambda: self.lines.append(f"end of {name}")


class Machine:
    @spanned("work")
    def work(self, hours: int) -> int:
        """Works."""
        return 2 * hours


def test_a_span_that_nobody_hears_is_one_shared_object_and_allocates_nothing() -> None:
    assert span("a") is span("b", object())
    subject = object()

    def many() -> int:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            with span("a", subject):
                pass
        return sys.getallocatedblocks() - before

    many()
    assert many() < 10


def test_listeners_hear_beginnings_and_ends_in_order() -> None:
    first, second = Notes(), Notes()
    with listen(first):
        with span("outer", 1), listen(second), span("inner", 2):
            pass
        with span("after"):
            pass
    with span("unheard"):
        pass
    assert first.lines == [
        ("outer", 1),
        ("inner", 2),
        "end of inner",
        "end of outer",
        ("after", None),
        "end of after",
    ]
    assert second.lines == [("inner", 2), "end of inner"]


def test_a_listener_hears_the_names_it_asks_for_and_no_other_span_costs() -> None:
    notes = Notes()
    with listen(notes, ("work",)):
        assert span("idle") is span("other"), "nothing is made for a span that none of them wants"
        with span("idle"), span("work"):
            pass
    assert notes.lines == [("work", None), "end of work"]


def test_the_same_listener_may_listen_twice() -> None:
    notes = Notes()
    with listen(notes):
        with listen(notes), span("a"):
            pass
        with span("b"):
            pass
    assert [line for line in notes.lines if isinstance(line, tuple)] == [
        ("a", None),
        ("a", None),
        ("b", None),
    ]


def test_a_span_ends_with_the_error_that_leaves_it() -> None:
    notes = Notes()
    with listen(notes), pytest.raises(ValueError, match="broken"), span("a"):
        raise ValueError("broken")
    assert notes.lines == [("a", None), "end of a"]


def test_a_method_is_a_span_about_its_object() -> None:
    machine, notes = Machine(), Notes()
    assert machine.work(hours=2) == 4
    with listen(notes):
        assert machine.work(3) == 6
    assert notes.lines == [("work", machine), "end of work"]
    assert Machine.work.__doc__ == "Works."


def test_spans_of_other_threads_are_heard_in_them() -> None:
    threads: list[str] = []
    with listen(lambda name, subject: threads.append(threading.current_thread().name)):
        worker = threading.Thread(target=Machine().work, args=(1,), name="worker")
        worker.start()
        worker.join()
    assert threads == ["worker"]
