"""Short turns on the processor, read back from the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, platform, struct, sys, threading
from minivllm.server.time_slices import ATTRIBUTES, SLICE_NANOSECONDS, SYSTEM_CALLS, take_short_turns

os.nice(3)
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()

def attributes(thread_id):
    buffer = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(SYSTEM_CALLS[platform.machine()] + 1, thread_id, buffer, ATTRIBUTES.size, 0) == 0
    return ATTRIBUTES.unpack(buffer.raw)

before = attributes(os.getpid())
ordinary = ATTRIBUTES.pack(ATTRIBUTES.size, 0, 0, 3, 0, 0, 0, 0)
if ctypes.CDLL(None).syscall(SYSTEM_CALLS[platform.machine()], 0, ordinary, 0):
    print("forbidden", flush=True)
    os._exit(0)
assert take_short_turns() == len(os.listdir("/proc/self/task")) >= 2
for thread_id in (os.getpid(), thread.native_id):
    _, policy, _, nice, _, runtime, _, _ = attributes(thread_id)
    assert (policy, nice) == (os.SCHED_OTHER, 3)
    assert runtime in (SLICE_NANOSECONDS, before[5])
granted = attributes(os.getpid())[5]
child = os.fork()
if child == 0:
    os._exit(0 if attributes(os.getpid())[5] == before[5] else 1)
assert os.waitpid(child, 0)[1] == 0
event.set()
print(granted)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has time slices to ask for")
def test_threads_ask_for_short_slices_and_keep_their_niceness_and_their_children_ask_for_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "forbidden" in done.stdout:
        pytest.skip("this sandbox lets nobody set how a thread is scheduled")
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    if kernel >= (6, 12):
        assert int(done.stdout) == 100_000
