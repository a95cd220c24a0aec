"""What besides its hash decides what a block holds, as one digest: no block of another model is taken for ours."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

SUFFIXES = (".safetensors", ".gguf", ".json")


def fingerprint(settings: Iterable[str], model_path: str) -> str:
    """Hex digest of settings and of a model's files, contents and all: a .gguf file, or those of a directory.

    The names of the files do not count, so that a copy elsewhere has the same fingerprint. Raises OSError.
    """
    digest = hashlib.sha256(b"minivllm KV blocks, version 1")
    for setting in settings:
        text = setting.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    files = [model_path]
    if os.path.isdir(model_path):
        names = sorted(name for name in os.listdir(model_path) if name.endswith(SUFFIXES))
        files = [os.path.join(model_path, name) for name in names]
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
