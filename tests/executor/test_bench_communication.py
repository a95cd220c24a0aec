"""What it costs to tell workers something, and to add their tensors (--benchmark-only).

    python -m pytest -n 0 --benchmark-only tests/executor/test_bench_communication.py

Two processes with one thread each. A record of a step crosses the ring to a reader that sleeps, and to one
that asks all the time. Tensors are added through shared memory, by ranks that ask for a while before they
sleep and by such that sleep at once, and through gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minivllm.distributed.segment import open_segment, segment_descriptors
from minivllm.executor.records.broadcast_ring import RingWriter

READER = """
import json, sys, time
from minivllm.executor.records.broadcast_ring import RingReader
descriptors, count, spins = json.loads(sys.argv[1])
reader, seconds = RingReader(*descriptors, 0, 1), []
print("ready", flush=True)
for _ in range(count):
    while spins and not reader.has_record:
        pass
    record = reader.read()
    seconds.append(time.perf_counter() - float(record[:20]))
print(json.dumps(seconds))
"""
RECORD_BYTES = 700
"""A decode step of 16 requests takes about as many."""
RANK = """
import json, sys, time, torch
from minivllm.distributed import shared_memory
from minivllm.distributed.gloo import GlooCommunicator
torch.set_num_threads(1)
rank, memory, events, way, rendezvous, rows, count = json.loads(sys.argv[1])
if way == "asleep":
    shared_memory.SPIN_SECONDS = 0.0
if way == "gloo":
    communicator = GlooCommunicator(rank, 2, rendezvous)
else:
    communicator = shared_memory.SharedMemoryCommunicator(rank, memory, events)
x, seconds = torch.full((rows, 576), 1.0 + rank), []
for _ in range(count):
    started = time.perf_counter()
    total = communicator.all_reduce(x)
    seconds.append(time.perf_counter() - started)
assert (total == 3.0).all()
print(json.dumps(seconds), flush=True)
if way == "gloo":
    communicator.close()
"""


def figures(benchmark: Any, name: str, seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    settled = seconds[len(seconds) // 5 :]
    benchmark.extra_info[name] = statistics.median(settled)
    with capsys.disabled():
        print(f"\n{name}: {1e6 * statistics.median(settled):.1f} µs", end="")


@pytest.mark.parametrize("spins", [False, True], ids=["asleep", "asking"])
def test_bench_record_to_a_reader(benchmark: Any, capsys: pytest.CaptureFixture[str], spins: bool) -> None:
    writer, count = RingWriter(1), 200
    command = [sys.executable, "-c", READER, json.dumps([writer.descriptors_of(0), count, spins])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=writer.descriptors_of(0))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"

    def send() -> list[float]:
        for _ in range(count):
            time.sleep(0.002)  # as long as a short step, so that who sleeps is asleep
            writer.write(f"{time.perf_counter():<20.9f}".encode().ljust(RECORD_BYTES))
        return json.loads(process.stdout.readline())  # type: ignore[union-attr,no-any-return]

    seconds = benchmark.pedantic(send, rounds=1)
    assert process.wait(30) == 0 and len(seconds) == count and min(seconds) > 0
    writer.close()
    figures(benchmark, f"ring, {RECORD_BYTES} bytes, {'asking' if spins else 'asleep'}", seconds, capsys)


@pytest.mark.parametrize("rows", [1, 16, 512])
def test_bench_sum_of_two_ranks(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: int
) -> None:
    def add(way: str) -> list[float]:
        segment = open_segment(2)
        descriptors = segment_descriptors(segment)
        given = [[rank, *segment, way, str(tmp_path / way), rows, 300] for rank in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(one)],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for one in given
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        for descriptor in descriptors:
            os.close(descriptor)
        return json.loads(outputs[0])  # type: ignore[no-any-return]

    def compare() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"asking": [], "asleep": [], "gloo": []}
        for turn in range(3 if benchmark.enabled else 1):
            for way in list(found)[:: 1 if turn % 2 == 0 else -1]:
                (tmp_path / way).unlink(missing_ok=True)
                found[way] += add(way)
        return found

    found = benchmark.pedantic(compare, rounds=1)
    for way, seconds in found.items():
        assert min(seconds) > 0
        figures(benchmark, f"sum of [{rows}, 576] float32, {way}", seconds, capsys)
