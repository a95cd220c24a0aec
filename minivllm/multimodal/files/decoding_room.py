"""A bound for decoding: few pictures at a time, and few bytes of decoded pixels together, in all threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MOST_AT_ONCE = 2
MOST_BYTES = 256 * 2**20
BYTES_PER_PIXEL = 8
"""Pillow takes 4 for a decoded pixel, and 4 for its copy in RGB."""


class DecodingRoom:
    """One for each frontend. Threads wait for their turn in the order in which they came, so a large picture
    is not overtaken for ever by small ones.

    most_at_once: pictures that are decoded or resized at the same time. most_bytes: of their pixels together;
    a picture of more gets in when it is alone.
    """

    def __init__(self, most_at_once: int = MOST_AT_ONCE, most_bytes: int = MOST_BYTES) -> None:
        self._most_at_once = most_at_once
        self._most_bytes = most_bytes
        self._waiting: deque[object] = deque()
        self._num_inside = 0
        self._num_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, num_pixels: int) -> Iterator[None]:
        """A place for one picture, as long as it is decoded. Blocks until there is one; a thread that has a
        place must not ask for another."""
        num_bytes = num_pixels * BYTES_PER_PIXEL
        self._enter(num_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._num_bytes -= num_bytes
                self._changed.notify_all()

    def _enter(self, num_bytes: int) -> None:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is turn and self._has_room(num_bytes))
                self._num_inside += 1
                self._num_bytes += num_bytes
            finally:  # also if the wait is interrupted
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        fits = self._num_inside == 0 or self._num_bytes + num_bytes <= self._most_bytes
        return fits and self._num_inside < self._most_at_once

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a place."""
        return len(self._waiting)
