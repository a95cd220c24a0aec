"""Records from one worker of a host to another, through memory that they share.

The memory is a ring of places, which the sender fills and the receiver empties in order. Two eventfds count
the full and the empty places; a process that finds none sleeps. A longer record takes several places.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

LinkDescriptors = tuple[int, int, int]
"""What workers inherit: of the memory, and of the eventfds that count full and empty places."""
NUM_PLACES = 16
"""Records that may wait for their receiver, each in a place of its own or more."""
PLACE_BYTES = 2**20
_LENGTH = struct.Struct("<Q")
"""In front of every record; in the same place."""


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """How a worker reaches those of other stages. source, sink: the residual stream, from the stage before
    and to the next one. tokens: what the last stage samples, to each of the others, or from it."""

    source: LinkDescriptors | None = None
    sink: LinkDescriptors | None = None
    tokens: tuple[LinkDescriptors, ...] = ()


def open_link() -> LinkDescriptors:
    """One that is empty. Memory that nothing was written to takes no room."""
    memory = os.memfd_create("minivllm-link", os.MFD_CLOEXEC)
    os.ftruncate(memory, NUM_PLACES * PLACE_BYTES)
    flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE
    return memory, os.eventfd(0, flags), os.eventfd(NUM_PLACES, flags)


class Link:
    """One end of a link. One side only sends and the other one only receives."""

    def __init__(self, descriptors: LinkDescriptors) -> None:
        memory, self._full, self._empty = descriptors
        self._memory = memoryview(mmap.mmap(memory, NUM_PLACES * PLACE_BYTES))
        self._turn = 0

    def send(self, record: bytes | memoryview) -> None:
        """Append a record; waits while all places are full."""
        rest = memoryview(record)
        header = _LENGTH.pack(len(rest))
        while rest or header:
            os.eventfd_read(self._empty)
            place = self._next_place()
            place[: len(header)] = header
            part = rest[: PLACE_BYTES - len(header)]
            place[len(header) : len(header) + len(part)] = part
            rest, header = rest[len(part) :], b""
            os.eventfd_write(self._full, 1)

    def receive(self) -> bytearray:
        """The next record; waits for it."""
        os.eventfd_read(self._full)
        place = self._next_place()
        record, start, taken = bytearray(_LENGTH.unpack_from(place)[0]), _LENGTH.size, 0
        while True:
            count = min(PLACE_BYTES - start, len(record) - taken)
            record[taken : taken + count] = place[start : start + count]
            taken += count
            os.eventfd_write(self._empty, 1)
            if taken == len(record):
                return record
            os.eventfd_read(self._full)
            place, start = self._next_place(), 0

    def _next_place(self) -> memoryview:
        start = self._turn * PLACE_BYTES
        self._turn = (self._turn + 1) % NUM_PLACES
        return self._memory[start : start + PLACE_BYTES]
