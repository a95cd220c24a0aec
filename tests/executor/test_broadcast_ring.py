"""The broadcast ring against a plain list:
everything arrives, in order, for any sizes and with any slow reader."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.executor.records.broadcast_ring import PeerGone, RingReader, RingWriter


def reader_of(writer: RingWriter, index: int) -> RingReader:
    """As in another process, with descriptors of its own."""
    memory, arrived, freed = map(os.dup, writer.descriptors_of(index))
    return RingReader(memory, arrived, freed, index, len(writer.arrived))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=30),
    capacity=st.integers(16, 200),
    num_readers=st.integers(1, 3),
    slow=st.sampled_from([0.0, 0.0005]),
)
def test_every_reader_gets_every_record_in_order(
    sizes: list[int], capacity: int, num_readers: int, slow: float
) -> None:
    records = [bytes((index + place) % 256 for place in range(size)) for index, size in enumerate(sizes)]
    writer = RingWriter(num_readers, capacity)
    readers = [reader_of(writer, index) for index in range(num_readers)]

    def read_all(reader: RingReader) -> list[bytes]:
        taken = []
        for _ in records:
            time.sleep(slow if reader is readers[-1] else 0)
            taken.append(reader.read())
        return taken

    with ThreadPoolExecutor(num_readers) as pool:
        taken = [pool.submit(read_all, reader) for reader in readers]
        for record in records:
            writer.write(record)
        assert [future.result(20) for future in taken] == [records] * num_readers
    for end in (writer, *readers):
        end.close()


def test_a_full_ring_makes_the_writer_wait_for_the_slowest_reader() -> None:
    writer = RingWriter(2, 100)
    quick, slow = (reader_of(writer, index) for index in range(2))
    writer.write(b"a" * 60)
    written = threading.Event()
    thread = threading.Thread(target=lambda: (writer.write(b"b" * 60), written.set()))
    thread.start()
    assert quick.read() == b"a" * 60
    assert not written.wait(0.1)
    assert slow.read() == b"a" * 60
    assert written.wait(10) and quick.read() == slow.read() == b"b" * 60
    thread.join()
    assert not quick.has_record
    writer.write(b"")
    assert quick.has_record and quick.read() == b"" and not quick.has_record


def test_the_death_of_a_reader_ends_the_wait_for_room() -> None:
    writer = RingWriter(1, 64)
    life, theirs = socket.socketpair()
    writer.write(b"x" * 40, [life.fileno()])
    life.setblocking(False)
    theirs.send(b"a message is no death")
    threading.Timer(0.1, theirs.close).start()
    with pytest.raises(PeerGone) as raised:
        writer.write(b"y" * 40, [life.fileno()])
    assert raised.value.descriptor == life.fileno()


def test_who_waits_does_not_compute() -> None:
    writer = RingWriter(1, 64)
    reader = reader_of(writer, 0)
    thread = threading.Thread(target=reader.read)
    thread.start()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    writer.write(b"now")
    thread.join(10)
    assert not thread.is_alive()


def test_a_record_that_is_not_the_next_one_is_noticed() -> None:
    writer = RingWriter(1, 64)
    reader = reader_of(writer, 0)
    writer._number = 5
    writer.write(b"sixth")
    with pytest.raises(RuntimeError, match="record 5 where 0 was expected"):
        reader.read()


def test_nothing_is_left_of_a_ring() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    writer = RingWriter(2, 64)
    reader = reader_of(writer, 0)
    reader.close()
    writer.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
