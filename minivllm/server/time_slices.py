"""Short turns on the processor for threads that wake often and work briefly.

While the engine computes, it keeps every core busy, and Linux lets a running thread finish its time slice (about 3 ms)
before one that wakes up gets the core. The server's threads wake several times for each token that they pass on. A
thread that asks for shorter slices than the running one has gets the core at once, and no larger share of it.

Source: ``sched_setattr(2)``; ``sched_runtime`` counts for ordinary threads since Linux 6.12, and nothing before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_NANOSECONDS = 100_000
"""The shortest that Linux grants."""
SYSTEM_CALLS = {"x86_64": 314, "aarch64": 274}
"""Of sched_setattr; neither Python nor most C libraries have a function for it."""
RESET_ON_FORK = 1
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime, deadline, period."""


def take_short_turns() -> int:
    """Ask for short time slices for every thread of this process, and return for how many that was granted.

    Threads and processes that are started later have ordinary ones. Does nothing where the system knows no such thing.
    """
    number = SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return 0
    call = ctypes.CDLL(None, use_errno=True).syscall
    granted = 0
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            if os.sched_getscheduler(thread) != os.SCHED_OTHER:
                continue
            nice = os.getpriority(os.PRIO_PROCESS, thread)
        except ProcessLookupError:  # it has ended
            continue
        attributes = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_OTHER, RESET_ON_FORK, nice, 0, SLICE_NANOSECONDS, 0, 0)
        granted += call(number, thread, attributes, 0) == 0
    return granted
