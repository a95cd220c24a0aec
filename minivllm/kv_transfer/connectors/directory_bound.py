"""A bound on the bytes of a directory of block files, which all processes that write there keep together.

A file beside the blocks says how many bytes they take. Who wants to write locks it and adds its own. Where
that is too much, the files that were used longest ago are deleted first. Bytes are counted before they are
written: after a crash the count may be too high, never too low, and looking through the directory sets it
right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
PART_NAME = re.compile(r"\.[0-9a-f]{64}\.safetensors\.\d+\.part")
"""A file that is being written, or was when its process died."""
OLD_PART_SECONDS = 3600.0
LOW_WATER = 0.9
"""Share of the bound that is left when files are deleted, so that it does not happen for every file."""
_COUNT = struct.Struct("<Q")


class DirectoryBound:
    """At most ``max_bytes`` in the block files below ``root``, which lie two folders deep.
    Nothing else is counted, or ever deleted."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._has_looked = False

    def reserve(self, num_bytes: int) -> bool:
        """Count a file that is about to be written, and make room for it; False if there can be none. Waits
        for other processes that do the same. Raises OSError."""
        if num_bytes > self._max_bytes:
            return False
        with self._locked() as descriptor:
            data = os.pread(descriptor, _COUNT.size, 0)
            is_known = self._has_looked and len(data) == _COUNT.size
            total = _COUNT.unpack(data)[0] if is_known else sum(size for _, size, _ in self._files())
            self._has_looked = True
            if total + num_bytes > self._max_bytes:
                total = self._make_room(int(LOW_WATER * self._max_bytes) - num_bytes)
            os.pwrite(descriptor, _COUNT.pack(total + num_bytes), 0)
            return total + num_bytes <= self._max_bytes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """A descriptor of the file with the count. The lock goes with its process."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._root / ".bytes", flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, wanted: int) -> int:
        """Delete what was used longest ago, until at most ``wanted`` bytes are left;
        how many there are then."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= wanted:
                break
            if PART_NAME.fullmatch(os.path.basename(path)):
                continue  # another process is about to rename it
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(time of the last use [ns], bytes, path) of every block file, and of those being written."""
        oldest = time.time_ns() - int(OLD_PART_SECONDS * 1e9)
        for model in _folders(self._root):
            for rank in _folders(model.path):
                for entry in os.scandir(rank.path):
                    is_part = PART_NAME.fullmatch(entry.name) is not None
                    if not is_part and BLOCK_NAME.fullmatch(entry.name) is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if is_part and info.st_mtime_ns < oldest:
                            os.unlink(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            yield info.st_mtime_ns, info.st_size, entry.path


def _folders(path: str | Path) -> Iterator[os.DirEntry[str]]:
    yield from (entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
