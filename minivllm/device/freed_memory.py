"""Memory that processes hold, and give back. Needs no torch: servers use it as well as workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Memory that a process takes up now, what it shares with others included;
    0 if it has ended, or where Linux's files do not say it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Hand what was freed back to the operating system,
    where the C library offers that (glibc keeps it otherwise).

    Loading a model frees a copy of every matrix, and a long text many times its size; both would count as
    used by this process for as long as it lives.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
