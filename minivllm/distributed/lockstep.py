"""Lockstep: engines that share experts take every step together.

Every engine counts the steps that it has begun, in shared memory. An engine whose count is lower than
another's also begins a step, with its requests or without any. So all engines join a step that one has begun.
If no engine has requests, none begins a step and all sleep; there is no end of a wave to agree on. (vLLM's
DPCoordinator counts waves instead, and tells engines when they begin and end.)
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.distributed.segment import Segment, open_segment, segment_descriptors

_LEFT = 2**62
"""Borders that an engine has come to which never begins a step again."""


@dataclass(frozen=True, kw_only=True)
class EngineSeat:
    """One of ``size`` engines that share experts, and what it inherits to reach the others. segment: where
    the workers of all of them exchange tensors, in order of engine and rank. board: memory for counts. bells:
    of each engine, the eventfd that wakes it."""

    rank: int
    size: int
    segment: Segment
    board: int
    bells: list[int]

    @property
    def descriptors(self) -> list[int]:
        """All of them."""
        return [*segment_descriptors(self.segment), self.board, *self.bells]

    def close(self) -> None:
        """Close them here; the engines have theirs."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_seats(size: int, num_workers: int) -> list[EngineSeat]:
    """Those of so many engines with so many workers each. They have the same descriptors."""
    board = os.memfd_create("minivllm-engines", os.MFD_CLOEXEC)
    os.ftruncate(board, mmap.PAGESIZE)
    segment, bells = open_segment(size * num_workers), [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size)]
    return [
        EngineSeat(rank=rank, size=size, segment=segment, board=board, bells=bells) for rank in range(size)
    ]


class Lockstep:
    """One engine's count of steps beside those of the others. Used by one thread."""

    def __init__(self, seat: EngineSeat) -> None:
        self._rank = seat.rank
        self._bells = seat.bells
        counts = memoryview(mmap.mmap(seat.board, mmap.PAGESIZE)).cast("q")
        self._begun = counts[: seat.size]
        self._arrived = counts[seat.size : 2 * seat.size]
        self._others = [bell for rank, bell in enumerate(seat.bells) if rank != seat.rank]
        self._has_news = threading.Event()
        self._wake: Callable[[], None] = lambda: None

    def listen(self, wake: Callable[[], None]) -> None:
        """From now on call ``wake`` whenever another engine begins a step, from a thread of its own."""
        self._wake = wake
        threading.Thread(target=self._listen, name="other engines", daemon=True).start()

    def _listen(self) -> None:
        while True:
            os.eventfd_read(self._bells[self._rank])
            self._has_news.set()
            self._wake()

    def begin(self) -> None:
        """This engine's next step goes to its workers now."""
        self._begun[self._rank] += 1
        self._ring()

    @property
    def is_behind(self) -> bool:
        """Whether another engine has begun a step that this one has not."""
        return max(self._begun) > self._begun[self._rank]

    def settle(self, take_part: Callable[[], object], for_good: bool = False) -> None:
        """Wait until all engines have called this as often: then none has a step in flight. take_part: begins
        a step, since others may need one meanwhile. for_good: this engine begins none afterwards, and is not
        waited for."""
        border = _LEFT if for_good else self._arrived[self._rank] + 1
        self._arrived[self._rank] = border
        self._ring()
        while True:
            self._has_news.clear()
            if self.is_behind:
                take_part()
            elif min(self._arrived) >= border:
                return
            else:
                self._has_news.wait()

    def _ring(self) -> None:
        """Counts are written in front of this system call and read behind the one that it wakes,
        on every processor."""
        for bell in self._others:
            os.eventfd_write(bell, 1)
