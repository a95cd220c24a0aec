"""Memory that was freed goes back to the operating system. Needs no torch: servers use it as well as workers."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Hand what was freed back to the operating system, where the C library offers that (glibc keeps it otherwise).

    Loading a model frees a copy of every matrix, and a long text many times its size; both would count as used by this
    process for as long as it lives.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
