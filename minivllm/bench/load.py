"""Other programs that want the cores: a busy machine, as an engine on a laptop finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
"""Takes one core, and ends with its parent."""


@contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run so many processes that spin, beside what the block does."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(os.getpid())]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
