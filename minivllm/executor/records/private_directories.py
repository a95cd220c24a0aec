"""Private directories for the sockets between processes,
which do not outlive their owner by more than one start.

The owner holds a lock on a file inside. It is free when the owner has ended, also by kill -9, and the next
process that makes such a directory removes those whose lock is free. A process id would not tell: containers
may share /tmp, and each counts its processes from 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, LOCK_FILE = "minivllm-", "owner.lock"
MAX_SOCKET_PATH = 100
"""Operating systems allow a little more than a hundred bytes for the path of a socket."""
OWN_BYTES = 32
"""Of a socket's path, after that of the directory that the system gives."""


class PrivateDirectory:
    """A directory of mode 0700 that belongs to this process. path: short enough for sockets inside."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + OWN_BYTES > MAX_SOCKET_PATH:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # It gets its name when it is locked, so that no other process finds it without.
        unnamed = self.path / "unlocked"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK_FILE)

    def remove(self) -> None:
        """Remove it with everything inside."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of owners that have ended; those of other users stay."""
    for lock_file in parent.glob(f"{PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):
            lock = os.open(lock_file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(lock_file.parent, ignore_errors=True)
            finally:
                os.close(lock)
