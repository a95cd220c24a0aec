"""One digest of all that decides the contents of a block besides its hash:
blocks of other models are never loaded.

Files are hashed whole: fine-tuned weights may differ from the original in few places, which samples of the
bytes would miss. It is done once. The digest of a file is remembered with its inode, size and times; the time
of the last change of the inode is the kernel's, so a writer cannot restore it. Files that changed a moment
ago
are not remembered: what is written within the same tick of the clock would not show.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time

import msgspec

from minivllm.errors import ModelError
from minivllm.hub.home import home_directory

logger = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".gguf", ".json")
MAX_REMEMBERED = 1000
MIN_AGE_SECONDS = 5.0
LARGE_BYTES = 2**28


def fingerprint(settings: str, model_path: str, eye_path: str | None = None) -> str:
    """Hex digest of a digest of settings and of a model's files, contents and all: a .gguf file, or those of
    a directory. The names of the files do not count, so that a copy elsewhere has the same fingerprint.

    eye_path: directory of the image encoder that is joined to the model, whose files count too.

    Raises ModelError if they cannot be read.
    """
    digest = hashlib.sha256(b"minivllm KV blocks, version 2 " + settings.encode())
    known = _KnownDigests()
    for mark, source in ((b"", model_path), (b"eye", eye_path)):
        if source is None:
            continue
        digest.update(mark)
        try:
            for path in _files_of(source):
                digest.update(bytes.fromhex(known.digest_of(path)))
        except OSError as error:
            raise ModelError(f"The model's files in {source} cannot be read ({error}).") from None
    known.save()
    return digest.hexdigest()


def _files_of(source: str) -> list[str]:
    """A file itself, or those of a directory that say what a model computes, in the order of their names."""
    if not os.path.isdir(source):
        return [source]
    return [os.path.join(source, name) for name in sorted(os.listdir(source)) if name.endswith(SUFFIXES)]


class _Entry(msgspec.Struct, frozen=True):
    """stamp: what changes when the file does. digest: SHA-256 of its contents."""

    stamp: list[int]
    digest: str


class _KnownDigests:
    """Digests by path, in ``file_digests.json`` below MINIVLLM_HOME. An unreadable file counts as empty."""

    def __init__(self) -> None:
        self._path = home_directory() / "file_digests.json"
        self._is_new = False
        self._entries: dict[str, _Entry] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._entries = msgspec.json.decode(self._path.read_bytes(), type=dict[str, _Entry])

    def digest_of(self, path: str) -> str:
        """Raises OSError."""
        name, began = os.path.realpath(path), time.time_ns()
        with open(name, "rb") as file:
            stamp = _stamp(file.fileno())
            entry = self._entries.get(name)
            if entry is not None and entry.stamp == stamp:
                return entry.digest
            if stamp[2] > LARGE_BYTES:
                logger.info("Reading %s once, to know its blocks from those of other models …", path)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _stamp(file.fileno()) == stamp and began - max(stamp[3:]) > MIN_AGE_SECONDS * 1e9:
                self._entries.pop(name, None)
                self._entries[name], self._is_new = _Entry(stamp, digest), True
        return digest

    def save(self) -> None:
        """Keep what is new, for the next start;
        others may do so at the same time, and the last one counts."""
        if not self._is_new:
            return
        entries = dict(list(self._entries.items())[-MAX_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, part = tempfile.mkstemp(dir=self._path.parent, prefix=".file_digests-")
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(entries))
            os.replace(part, self._path)


def _stamp(descriptor: int) -> list[int]:
    """Device, inode, size, and the times of the last change of contents and of the inode [ns]."""
    info = os.fstat(descriptor)
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
