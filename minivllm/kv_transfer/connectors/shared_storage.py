"""A directory as a tier of the prefix cache: one safetensors file per block, which any later process can hit.

A file's name is the block's hash, in a folder named by the fingerprint of all else that decides what the
block holds. A file appears whole: it is written under another name and renamed. It is used only if its size,
its header and the digest of its contents are what they must be; everything else is ignored, once with a line
in the log, and replaced when the block has been computed anew. (vLLM's SharedStorageConnector, with the hash
of a block in place of raw tokens.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError
from minivllm.kv_cache.manager import FullBlock
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext
from minivllm.kv_transfer.connectors.directory_bound import DirectoryBound
from minivllm.kv_transfer.connectors.queued_saves import QueuedSaves
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, WorkerContext
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockTransfer

logger = logging.getLogger(__name__)

MAX_KNOWN_BLOCKS = 2**17
"""Names that are remembered, so that a request that waits is not looked up on the disk in every step."""
KNOWN_SECONDS = 1.0
"""For how long: other processes may delete files."""
NEVER = -1.0
SAFETENSORS_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class SharedStorageOptions(msgspec.Struct, forbid_unknown_fields=True):
    """shared_storage_path: a directory, made if it does not exist. max_bytes: most bytes of all block files
    in it, of other models too; those used longest ago are deleted. None for no bound."""

    shared_storage_path: str
    max_bytes: int | None = None


def folder_of(context: TransferContext, rank: int) -> Path:
    """Where a worker's parts of the blocks of this model, with these settings, lie."""
    name = f"rank{rank}of{context.num_ranks}"
    return Path(context.options.shared_storage_path) / context.config.fingerprint / name


def path_of(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.safetensors"


class BlockFile:
    """The format: a safetensors file with the tensors "0.k", "0.v", "1.k",
    … and the digest of their bytes; of a state "0.0", "0.1", …."""

    def __init__(self, blocks: CacheBlocks) -> None:
        self.block_bytes = blocks.block_bytes
        self._tensors: dict[str, object] = {}
        start = 0
        for name, dtype, shape in blocks.layout:
            stop = start + getattr(torch, dtype).itemsize * torch.Size(shape).numel()
            self._tensors[name] = {
                "dtype": SAFETENSORS_DTYPES[dtype],
                "shape": shape,
                "data_offsets": [start, stop],
            }
            start = stop

    @property
    def file_bytes(self) -> int:
        """Of a whole file, which is the same for all blocks."""
        return len(self.header(bytes(32), torch.empty(0, dtype=torch.uint8))) + self.block_bytes

    def header(self, key: bytes, contents: Tensor) -> bytes:
        """Everything before the tensors' bytes.
        There is one right header for a block, so it is simply compared."""
        digest = hashlib.sha256(contents.numpy().data).hexdigest()
        entries = {"__metadata__": {"block_hash": key.hex(), "sha256": digest}, **self._tensors}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def write(self, path: Path, key: bytes, contents: Tensor) -> None:
        """Raises OSError."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, 0o600), "wb") as file:
                file.write(self.header(key, contents))
                file.write(contents.numpy().data)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, path: Path, key: bytes) -> Tensor:
        """The contents, uint8 [block_bytes].
        Raises OSError, or ValueError for anything but the block's file."""
        expected = self.file_bytes
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("it is no regular file")
            if info.st_size != expected:
                raise ValueError(f"it has {info.st_size} bytes in place of {expected}")
            data = bytearray(expected)
            if file.readinto(data) != expected:
                raise ValueError("it ends early")
        contents = torch.frombuffer(data, dtype=torch.uint8)[expected - self.block_bytes :]
        if data[: expected - self.block_bytes] != self.header(key, contents):
            raise ValueError("its header or its contents are not those of this block")
        return contents


class SharedStorageScheduler(BlockStore):
    """Asks the directory whether the files of all ranks are there. A failed block is not asked for again."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        self._folders = [folder_of(context, rank) for rank in range(context.num_ranks)]
        self._known: OrderedDict[bytes, float] = OrderedDict()
        max_bytes = context.options.max_bytes
        what = (
            f"block of {context.block_size} tokens" if context.block_bytes > context.state_bytes else "state"
        )
        largest = max(context.block_bytes, context.state_bytes)
        if max_bytes is not None and max_bytes < largest:
            raise ConfigError(
                f"max_bytes is {max_bytes}, but one {what} takes {largest}, and its files a little more: "
                "give "
                "SharedStorageConnector more."
            )

    def holds(self, key: bytes) -> bool:
        seen, now = self._known.get(key), time.monotonic()
        if seen == NEVER:
            return False
        if seen is None or now - seen > KNOWN_SECONDS:
            if not all(path_of(folder, key).is_file() for folder in self._folders):
                return False
            self._remember(key, now)
        return True

    def save(self, blocks: Sequence[FullBlock]) -> list[BlockTransfer]:
        missing = [block for block in blocks if not self.holds(block.key)]
        for block in missing:  # a file that was not good is about to be replaced
            self._known.pop(block.key, None)
        return super().save(missing)

    def _remember(self, key: bytes, seen: float) -> None:
        self._known[key] = seen
        if len(self._known) > MAX_KNOWN_BLOCKS:
            self._known.popitem(last=False)

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        for key in self.failed(load, num_valid_blocks):
            self._remember(key, NEVER)

    def reset_cache(self) -> None:
        self._known.clear()

    def new_weights(self, fingerprint: str) -> None:
        super().new_weights(fingerprint)
        self._folders = [folder_of(self.context, rank) for rank in range(self.num_ranks)]


class SharedStorageWorker(QueuedSaves):
    """Reads and writes the files of one rank."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._use_folder()
        options = context.transfer.options
        root = Path(options.shared_storage_path)
        self._bound = None if options.max_bytes is None else DirectoryBound(root, options.max_bytes)
        self._bad: set[bytes] = set()

    def _use_folder(self) -> None:
        transfer = self.context.transfer
        self._folder = folder_of(transfer, transfer.rank)
        if transfer.config.saves:
            self._folder.mkdir(parents=True, exist_ok=True)

    def new_weights(self, fingerprint: str) -> None:
        super().new_weights(fingerprint)
        self._use_folder()
        self._bad.clear()

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        path = path_of(self._folder, key)
        try:
            return BlockFile(blocks).read(path, key)
        except FileNotFoundError:  # deleted since the scheduler's side saw it
            return None
        except (OSError, ValueError) as error:
            if key not in self._bad:
                self._bad.add(key)
                logger.warning("%s is ignored, and will be written anew: %s.", path, error)
            return None

    def loaded(self, keys: Sequence[bytes]) -> None:
        for key in reversed(
            keys
        ):  # of one prompt the beginning is used most recently, so that it stays longest
            with contextlib.suppress(OSError):
                os.utime(path_of(self._folder, key), follow_symlinks=False)

    def write_block(
        self, transfer: TransferContext, key: bytes, contents: Tensor, blocks: CacheBlocks
    ) -> None:
        form = BlockFile(blocks)
        if self._bound is None or self._bound.reserve(form.file_bytes):
            form.write(path_of(folder_of(transfer, transfer.rank), key), key, contents)
            self._bad.discard(key)


class SharedStorageConnector(KVConnector):
    """Keeps full blocks in a directory.
    kv_connector_extra_config: {"shared_storage_path": …, "max_bytes": …}."""

    Options = SharedStorageOptions
    moves_parts = moves_states = takes_new_weights = True
    outlives_engine = True
    scheduler_side = SharedStorageScheduler
    worker_side = SharedStorageWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        path = Path(options.shared_storage_path)
        if options.max_bytes is not None and options.max_bytes < 1:
            raise ConfigError(f"max_bytes is {options.max_bytes}, but must be at least 1.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"shared_storage_path {str(path)!r} cannot be used ({error}): name a directory."
            ) from None
        if not os.access(path, os.R_OK | os.X_OK | (os.W_OK if config.saves else 0)):
            raise ConfigError(
                f"shared_storage_path {str(path)!r} cannot be read or written: name another directory."
            )
