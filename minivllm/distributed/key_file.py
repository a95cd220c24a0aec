"""A secret that hosts share, in a file."""

from __future__ import annotations

from pathlib import Path

from minivllm.errors import ConfigError

MIN_KEY_BYTES = 32


def read_key(path: str) -> bytes:
    """The secret; empty without a path. Raises ConfigError."""
    if not path:
        return b""
    try:
        mode, key = Path(path).stat().st_mode, Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key_file {path!r} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise ConfigError(f"key_file {path!r} can be read by other users: chmod 600 it.")
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"key_file {path!r} has {len(key)} bytes, but must have at least {MIN_KEY_BYTES}.")
    return key
