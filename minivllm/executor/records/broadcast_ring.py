"""A bounded queue in shared memory: one process writes records, and each of several others reads all of them.

The bytes of the records follow one another in a ring. The writer has one cursor and every reader has one.
A writer without room waits for the slowest reader. A process that waits sleeps on an eventfd; none polls in a
loop. A cursor is read only after the eventfd of its owner: these system calls order it after the bytes that
it stands for, on every processor.
(vLLM V1's shared-memory broadcast queue, as a stream of bytes: a record may be larger than the ring.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
from collections.abc import Sequence

RING_BYTES = 4 * 2**20
_HEADER = struct.Struct("<II")
"""In front of every record: its length, and its number, which wraps around."""
_PLACE = 4096
"""Bytes that a cursor has for itself.
Behind a reader's lie the digests that it noted last, with their numbers."""
_NOTES = _PLACE // 8 - 8


class PeerGone(Exception):
    """The process at the other end of ``descriptor`` has closed it, mostly by ending."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(f"The peer behind descriptor {descriptor} has gone.")
        self.descriptor = descriptor


class _Ring:
    """The shared memory, and what both sides do with it. Cursors count bytes since the beginning."""

    def __init__(self, memory: int, num_readers: int) -> None:
        self._map = mmap.mmap(memory, 0)
        first = _PLACE * (1 + num_readers)
        self._capacity = len(self._map) - first
        whole = memoryview(self._map)
        self._cursors = whole[:first].cast("Q")
        self._data = whole[first:]
        self._number = 0

    def _cursor(self, index: int) -> int:
        return self._cursors[index * _PLACE // 8]

    def _set_cursor(self, index: int, value: int) -> None:
        self._cursors[index * _PLACE // 8] = value

    def _unmap(self) -> None:
        self._cursors.release()
        self._data.release()
        self._map.close()


class RingWriter(_Ring):
    """The side that writes. memory: a descriptor of the ring, for the readers; arrived: for each reader, the
    eventfd that tells it of records; freed: the one that tells the writer of room."""

    def __init__(self, num_readers: int, capacity: int = RING_BYTES) -> None:
        self.memory = os.memfd_create("minivllm-ring", os.MFD_CLOEXEC)
        os.ftruncate(self.memory, _PLACE * (1 + num_readers) + capacity)
        super().__init__(self.memory, num_readers)
        self.arrived = [_event() for _ in range(num_readers)]
        self.freed = _event()
        self._written = self._slowest = 0

    def descriptors_of(self, reader: int) -> tuple[int, int, int]:
        """What that ``RingReader`` is made from, after they were passed to its process."""
        return self.memory, self.arrived[reader], self.freed

    def write(self, record: bytes, watched: Sequence[int] = ()) -> None:
        """Append a record; waits while the ring is full. Raises PeerGone if, meanwhile, one of the
        descriptors is closed at its other end: a reader that has ended makes no room."""
        poll = select.poll()
        poll.register(self.freed, select.POLLIN)
        for descriptor in watched:
            poll.register(descriptor, 0)  # only that it was closed
        for part in (_HEADER.pack(len(record), self._number), record):
            rest = memoryview(part)
            while rest:
                room = self._capacity - (self._written - self._slowest)
                if room == 0:
                    self._publish()
                    _wait(poll, self.freed)
                    self._slowest = min(self._cursor(1 + reader) for reader in range(len(self.arrived)))
                    continue
                start = self._written % self._capacity
                count = min(room, len(rest), self._capacity - start)
                self._data[start : start + count] = rest[:count]
                self._written += count
                rest = rest[count:]
        self._number = (self._number + 1) % 2**32
        self._publish()

    def digest(self, reader: int, number: int) -> int | None:
        """What the reader has noted under this number, one of its last ones;
        None if it has not come so far."""
        note = self._cursors[(1 + reader) * _PLACE // 8 + 8 + number % _NOTES]
        return note % 2**32 if note >> 32 == number % 2**32 else None

    def _publish(self) -> None:
        self._set_cursor(0, self._written)
        for event in self.arrived:
            os.eventfd_write(event, 1)

    def close(self) -> None:
        """Release memory and descriptors. The last call."""
        self._unmap()
        for descriptor in (self.memory, self.freed, *self.arrived):
            os.close(descriptor)


class RingReader(_Ring):
    """The side of one reader, which takes over the descriptors (see RingWriter.descriptors_of)."""

    def __init__(self, memory: int, arrived: int, freed: int, reader: int, num_readers: int) -> None:
        super().__init__(memory, num_readers)
        self._descriptors = (memory, arrived, freed)
        self._arrived = arrived
        self._freed = freed
        self._own = 1 + reader
        self._read = self._known = self._cursor(self._own)
        self._poll = select.poll()
        self._poll.register(arrived, select.POLLIN)

    def fileno(self) -> int:
        """To be polled for records, where ``has_record`` is False."""
        return self._arrived

    @property
    def has_record(self) -> bool:
        """Whether there is something to read now."""
        if self._read == self._known and self._poll.poll(0):
            # The event may stand for records that were read already.
            os.eventfd_read(self._arrived)
            self._known = self._cursor(0)
        return self._read < self._known

    def read(self) -> bytes:
        """The next record; waits for it."""
        length, number = _HEADER.unpack(self._take(_HEADER.size))
        if number != self._number:
            raise RuntimeError(f"The ring holds record {number} where {self._number} was expected.")
        self._number = (self._number + 1) % 2**32
        record = self._take(length)
        self._release()
        return record

    def note(self, number: int, digest: int) -> None:
        """Leave 32 bits for the writer, under a number from 1 on."""
        self._cursors[self._own * _PLACE // 8 + 8 + number % _NOTES] = number % 2**32 << 32 | digest

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            if self._read == self._known:
                self._release()
                _wait(self._poll, self._arrived)
                self._known = self._cursor(0)
                continue
            start = self._read % self._capacity
            count = min(size - len(taken), self._known - self._read, self._capacity - start)
            taken += self._data[start : start + count]
            self._read += count
        return bytes(taken)

    def _release(self) -> None:
        """Let the writer have the room of what was read."""
        if self._cursor(self._own) != self._read:
            self._set_cursor(self._own, self._read)
            os.eventfd_write(self._freed, 1)

    def close(self) -> None:
        """Release memory and descriptors. The last call."""
        self._unmap()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _event() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _wait(poll: select.poll, event: int) -> None:
    """Sleep until the event is written, and reset it. Raises PeerGone."""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != event:
                raise PeerGone(descriptor)
        with contextlib.suppress(BlockingIOError):  # another thread has taken the wake-up
            os.eventfd_read(event)
            return
