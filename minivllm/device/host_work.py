"""Work of the host in the midst of a step, such as an exchange through host memory.

It is done at once. Where CUDA graphs are captured, it breaks the graph: it is done between two of them, again
at every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class Capture(Protocol):
    """A capture that can be broken."""

    def run_between(self, function: Callable[[], None]) -> None:
        """Run function now, outside any graph, and again in this place at every replay."""


_captures: list[Capture] = []


@contextmanager
def broken_by_host_work(capture: Capture) -> Iterator[None]:
    """Meanwhile ``on_host`` breaks this capture. A process captures one at a time."""
    _captures.append(capture)
    try:
        yield
    finally:
        _captures.pop()


def on_host(compute: Callable[[], Tensor]) -> Tensor:
    """What compute returns, always of the same shape. In a graph: at an address that every replay fills
    anew."""
    if not _captures:
        return compute()
    results: list[Tensor] = []

    def run() -> None:
        result = compute()
        if results:
            results[0].copy_(result)
        else:
            results.append(result)

    _captures[-1].run_between(run)
    return results[0]


def do_on_host(act: Callable[[], None]) -> None:
    """``on_host`` without a result."""
    if _captures:
        _captures[-1].run_between(act)
    else:
        act()
