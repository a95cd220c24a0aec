"""LMCache's server as a client sees it:
bytes under names, over a socket (LMCache 0.5, lmcache/v1/protocol.py).

Requests and replies have a fixed length. The server says nothing about what it was given, and keeps it until
it ends; it knows neither its clients nor what it keeps. So what is kept carries a seal: an HMAC over its name
and its bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from minivllm.distributed.key_file import read_key
from minivllm.kv_transfer.connector import TransferContext
from minivllm.kv_transfer.lookup.pipe import Address, Pipe

logger = logging.getLogger(__name__)

REQUEST = struct.Struct("<9i150s")
"""Command, bytes that follow, format, dtype, location, four sizes of a shape, name."""
REPLY = struct.Struct("<9i")
"""Code, bytes that follow, and what the client said of them."""
SUCCESS = 200
BINARY, UINT8 = 4, 6
"""Format and dtype of bytes that only the client understands."""
SEAL_BYTES = 32
BATCH = 64
"""Requests that are sent before their replies are read."""
RETRY_SECONDS = 5.0
"""For how long a server that has failed is left alone."""

Result = TypeVar("Result")


class Command(IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3


class Names:
    """Names and seals of one rank's parts of the blocks of one model."""

    def __init__(self, context: TransferContext, rank: int) -> None:
        """Raises ConfigError for a key file that cannot be used."""
        self._prefix = f"minivllm-{context.config.fingerprint[:40]}@{context.num_ranks}@{rank}@"
        self._secret = read_key(context.options.key_file)

    def request(self, command: Command, key: bytes, num_bytes: int = 0) -> bytes:
        name = f"{self._prefix}{key.hex()}@uint8".encode().ljust(150)
        return REQUEST.pack(command, num_bytes, BINARY, UINT8, 0, num_bytes, 0, 0, 0, name)

    def seal(self, key: bytes, contents: Tensor) -> bytes:
        """SEAL_BYTES that only a holder of the key file can make. contents: uint8, in host memory."""
        digest = hmac.new(self._secret, self._prefix.encode() + key, hashlib.sha256)
        digest.update(contents.numpy().data)
        return digest.digest()


class Client:
    """A connection that is made when it is needed, for one thread at a time. Calls raise OSError, or
    ValueError for what is no answer, and then for RETRY_SECONDS without trying."""

    def __init__(self, address: Address, timeout: float) -> None:
        """timeout: seconds that a call may take."""
        self._address = address
        self._timeout = timeout
        self._pipe: Pipe | None = None
        self._not_before = 0.0
        self._has_failed = False

    def exist(self, requests: Sequence[bytes]) -> list[bool]:
        """The answers to requests to EXIST, of a batch or less."""

        def ask(pipe: Pipe, deadline: float) -> list[bool]:
            pipe.send(b"".join(requests), deadline)
            data = pipe.receive(REPLY.size * len(requests), deadline)
            return [reply[0] == SUCCESS for reply in REPLY.iter_unpack(data)]

        return self._call(ask)

    def get(self, request: bytes, data: Tensor) -> bool:
        """Fill ``data``, uint8 in host memory, with what is kept; False if it is missing."""

        def ask(pipe: Pipe, deadline: float) -> bool:
            pipe.send(request, deadline)
            code, num_bytes, *_ = REPLY.unpack(pipe.receive(REPLY.size, deadline))
            if code != SUCCESS:
                return False
            if num_bytes != data.numel():
                raise ValueError(f"{num_bytes} bytes came in place of {data.numel()}")
            pipe.receive_into(data.numpy().data, deadline)
            return True

        return self._call(ask)

    def put(self, request: bytes, seal: bytes, contents: Tensor) -> None:
        """Have the seal and the contents kept; there is no answer."""

        def send(pipe: Pipe, deadline: float) -> None:
            pipe.send(request + seal, deadline)
            pipe.send(contents.numpy().data, deadline)

        self._call(send)

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _call(self, work: Callable[[Pipe, float], Result]) -> Result:
        now = time.monotonic()
        if now < self._not_before:
            raise ConnectionError("the server has failed a moment ago")
        try:
            if self._pipe is not None and not self._pipe.is_quiet:  # it has died since it was used last
                self.close()
            if self._pipe is None:
                self._pipe = self._address.connect(now + self._timeout, None)
            result = work(self._pipe, now + self._timeout)
        except (OSError, ValueError) as error:
            self.close()
            self._not_before = time.monotonic() + RETRY_SECONDS
            if not self._has_failed:
                logger.warning("The LMCache server at %s has failed: %s.", self._address.text, error)
            self._has_failed = True
            raise
        self._has_failed = False
        return result


def received(num_bytes: int, is_pinned: bool) -> Tensor:
    """Memory for a seal and so many bytes of contents."""
    return torch.empty(SEAL_BYTES + num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
