"""A pipe between two engines: short messages and tensors, in order, over a socket (vLLM V0's Pipe).

Every call has a deadline. Nothing is read beyond what was expected: a message has a bound and a type, a
tensor exactly the size that the receiver knows already. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import ssl
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
from torch import Tensor

from minivllm.errors import ConfigError

MAX_MESSAGE_BYTES = 2**22
MAX_SOCKET_PATH = 100
"""Operating systems allow a little more than a hundred bytes for the path of a socket."""
BACKLOG = 64
KEEP_ALIVE_SECONDS = 10
_LENGTH = struct.Struct("<I")

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""Hash of a block."""


class DropSelect(msgspec.Struct, frozen=True, tag="drop_select"):
    """A consumer wants these blocks, in this order, up to the first one that is missing."""

    keys: list[Key]


class Block(msgspec.Struct, frozen=True, tag="block"):
    """The answer for one block. num_bytes: of the contents that follow; None if it is missing, which ends the
    answer."""

    key: Key
    num_bytes: int | None


class News(msgspec.Struct, frozen=True, tag="news"):
    """Blocks that have come into a producer's buffer, and blocks that have gone; empty as a sign of life."""

    came: list[Key] = []
    gone: list[Key] = []


Message = TypeVar("Message", bound=msgspec.Struct)


class Pipe:
    """One end of a connection; each direction is for one thread at a time.

    deadline: value of time.monotonic() at which a call gives up. All calls raise OSError when the connection
    ends or the deadline is over (TimeoutError), and ValueError for what is no message of ours.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: bytes | memoryview, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait_until(deadline)
            rest = rest[self._socket.send(rest) :]

    def receive_into(self, data: memoryview, deadline: float) -> None:
        while data:
            self._wait_until(deadline)
            count = self._socket.recv_into(data)
            if not count:
                raise ConnectionError("the other end has closed the connection")
            data = data[count:]

    def receive(self, num_bytes: int, deadline: float) -> bytes:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def send_message(self, message: msgspec.Struct, deadline: float) -> None:
        data = msgspec.msgpack.encode(message)
        self.send(_LENGTH.pack(len(data)) + data, deadline)

    def receive_message(self, kind: type[Message], deadline: float) -> Message:
        [length] = _LENGTH.unpack(self.receive(_LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
        try:
            return msgspec.msgpack.decode(self.receive(length, deadline), type=kind)
        except msgspec.MsgspecError as error:
            raise ValueError(f"a message is no {kind.__name__}: {error}") from None

    def send_tensor(self, key: bytes, data: Tensor | None, deadline: float) -> None:
        """data: uint8 [num_bytes] in host memory; None: the block is missing."""
        self.send_message(Block(key, None if data is None else data.numel()), deadline)
        if data is not None:
            self.send(data.numpy().data, deadline)

    def receive_tensor(self, key: bytes, data: Tensor, deadline: float) -> bool:
        """Fill ``data``, uint8 [num_bytes], with the block that comes next; False if it is missing there."""
        block = self.receive_message(Block, deadline)
        if block.key != key or block.num_bytes not in (None, data.numel()):
            raise ValueError("another block came than the one asked for")
        if block.num_bytes:
            self.receive_into(data.numpy().data, deadline)
        return block.num_bytes is not None

    @property
    def is_quiet(self) -> bool:
        """False if there is something to read:
        where nothing was asked for, that is the end of the connection."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """From any thread; senders and receivers get an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(left if left < 1e6 else None)


@dataclass(frozen=True)
class Address:
    """Where a producer listens: a Unix-domain socket (path), or host and port."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError."""
        try:
            parts = urlsplit(text)
            if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
                if len(os.fsencode(parts.path)) <= MAX_SOCKET_PATH:
                    return cls(text, path=parts.path)
            elif parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path:
                return cls(text, host=parts.hostname, port=parts.port)
        except ValueError:
            pass
        raise ConfigError(
            f"{text!r} is no address of a connector: write unix:///path/of/a/socket, at most "
            f"{MAX_SOCKET_PATH} bytes long, or tcp://host:port."
        )

    def beside(self, rank: int) -> Address:
        """Where the worker of this rank listens if that of rank 0 listens here: "/path.1", or the next ports.
        Raises ConfigError if there is no such place."""
        if not rank:
            return self
        if self.path:
            return Address.parse(f"{self.text}.{rank}")
        return Address.parse(f"{self.text.rpartition(':')[0]}:{self.port + rank}")

    @property
    def is_local(self) -> bool:
        """True if only this machine can be there."""
        try:
            return bool(self.path) or self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self, deadline: float, tls: ssl.SSLContext | None) -> Pipe:
        """Raises OSError."""
        left = max(deadline - time.monotonic(), 0.001)
        if self.path:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(left)
            try:
                connection.connect(self.path)
            except OSError:
                connection.close()
                raise
            return Pipe(connection)
        return Pipe(_secured(_tuned(socket.create_connection((self.host, self.port), left)), tls, self.host))

    def listen(self) -> socket.socket:
        """A listening socket; one that a killed process has left behind is replaced. Raises ConfigError."""
        try:
            if not self.path:
                family, _, _, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
                listener = socket.socket(family)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
            else:
                self._remove_left_behind()
                listener = socket.socket(socket.AF_UNIX)
                old = os.umask(0o177)
                try:
                    listener.bind(self.path)
                finally:
                    os.umask(old)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            raise ConfigError(
                f"The connector cannot listen at {self.text} ({error.strerror or error}): choose another "
                "address."
            ) from None

    def _remove_left_behind(self) -> None:
        path = Path(self.path)
        if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self.path)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def accepted(connection: socket.socket, tls: ssl.SSLContext | None, seconds: float) -> Pipe:
    """The producer's end of a connection. Raises OSError."""
    connection.settimeout(seconds)
    if connection.family == socket.AF_UNIX:
        return Pipe(connection)
    return Pipe(_secured(_tuned(connection), tls))


def _secured(connection: socket.socket, tls: ssl.SSLContext | None, host: str | None = None) -> socket.socket:
    if tls is None:
        return connection
    try:
        return tls.wrap_socket(connection, server_side=host is None, server_hostname=host)
    except (OSError, ValueError):
        connection.close()
        raise


def _tuned(connection: socket.socket) -> socket.socket:
    """Small messages leave at once, and a host that has vanished is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_SECONDS)
    return connection
