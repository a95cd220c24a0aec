"""HTTP connections that cannot be held open for nothing: every wait for the client has an end.

uvicorn bounds the size of headers, but waits forever for their end, for a body, and for a reader to read on.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from minivllm.server.bodies.errors import ApiError, error_response

logger = logging.getLogger(__name__)

READ_BYTES = 4096
"""Taken from a socket at a time. In chunks of one byte, 256 KiB of a body would take 1 s to parse."""
UNREAD_BYTES = 16384
"""An answer may be so far ahead of its reader, in this process and once more in the system's buffer. The
system alone would take megabytes, and for a reader that has stopped reading each token would be written out
until they are full."""
MAX_SMALL_CHUNKS, BODY_BYTES_PER_CHUNK = 4096, 64
"""A body may come in so many chunks, and in one more for every 64 bytes:
each costs the same, whatever it holds."""

MAX_CONNECTIONS = 4096
MAX_FILES = 2**20
"""Stands for a limit of open files that is none."""
OTHER_FILES = 256
"""Files and sockets of this process besides connections of clients."""
MAX_CANDIDATES = 32
"""So many connections are looked at to find one that may end,
so that a burst of new ones costs little each."""
READ_AGAIN_SECONDS = 1.0
"""A request whose time is over while bytes of it wait here to be read gets so long to be read."""


def max_connections(files_per_connection: int = 1) -> int:
    """The connections that the limit of open files allows, once it is raised as far as the system lets it.

    files_per_connection: a connection of a client, and those to other servers that its request needs.
    """
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard_limit == resource.RLIM_INFINITY else hard_limit
    wanted = min(MAX_CONNECTIONS * files_per_connection + OTHER_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))
    return max(1, (wanted - OTHER_FILES) // files_per_connection)


MAX_HEAD_BYTES = 16384
"""Of a request's line and its headers."""


class ChunkCount(h11.Connection):
    """The parser of one connection. num_chunks, num_body_bytes: of the request that is arriving, so far."""

    num_chunks = num_body_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.num_chunks += event.chunk_end
            self.num_body_bytes += len(event.data)
        elif isinstance(event, h11.Request):
            self.num_chunks = self.num_body_bytes = 0
        return event


@dataclass
class ConnectionLimits:
    """Limits of all connections of one server.

    head_seconds: from the first byte of a request, or from connecting, to the end of its head. body_seconds:
    from there to the end of its body. write_seconds: a reader must read on within this time. max_connections:
    open at a time; one more ends the one that has waited for its client longest, idle ones included, or is
    refused if there is none. waiting: connections that wait for their client, the longest waiting first.
    """

    head_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 30.0
    max_connections: int = field(default_factory=max_connections)
    waiting: dict[BoundedConnection, None] = field(default_factory=dict)


class BoundedConnection(H11Protocol):
    """One connection: idle, receiving a head, receiving a body, or being answered."""

    conn: ChunkCount

    def __init__(self, *, limits: ConnectionLimits, **others: Any) -> None:
        super().__init__(**others)
        self.conn = ChunkCount(h11.SERVER, MAX_HEAD_BYTES)
        self._limits = limits
        self._waits_for = ""
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNREAD_BYTES)
        self._wait_for("head")
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if not self._waits_for and not self._is_answering:
            self._wait_for("head")
        super().data_received(data)
        self._look()
        if self.conn.num_chunks > MAX_SMALL_CHUNKS + self.conn.num_body_bytes // BODY_BYTES_PER_CHUNK:
            message = (
                "The body comes in too many small chunks: send it in larger ones, or with a Content-Length."
            )
            self._end(
                message, ApiError(400, message, code="chunks_too_small", headers={"connection": "close"})
            )

    def send_400_response(self, msg: str) -> None:
        message = f"This is no valid HTTP request, or its head has more than {MAX_HEAD_BYTES} bytes."
        self._end(message, ApiError(400, message, code="invalid_http", headers={"connection": "close"}))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_seconds, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        self._limits.waiting.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """See what the client owes now."""
        if self._is_answering:
            self._wait_for("body" if self.cycle.more_body else "")
        elif self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body")  # of a request that was answered, that is refused, before it had arrived
        elif self.cycle is not None and not self.conn.trailing_data[0]:
            self._wait_for("")  # idle: uvicorn's own timer ends it
        if not self._is_answering and not self.transport.is_closing():
            self._limits.waiting.setdefault(self)

    def _wait_for(self, what: str) -> None:
        """Start the clock for ``what``; "" stops it. One that runs for the same thing goes on."""
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        waiting = self._limits.waiting
        if not what:
            waiting.pop(self, None)
            return
        seconds = self._limits.head_seconds if what == "head" else self._limits.body_seconds
        message = f"The {what} of the request did not arrive within {seconds:g} s."
        self._receive_timer = self.loop.call_later(seconds, self._is_late, message)
        waiting.setdefault(self)

    def _is_late(self, message: str) -> None:
        """End the connection, unless its client has sent what this process has not read yet."""
        if self._has_unread_bytes():
            self._receive_timer = self.loop.call_later(READ_AGAIN_SECONDS, self._is_late, message)
        else:
            self._end(message)

    def _has_unread_bytes(self) -> bool:
        """True if the client has sent bytes, or has gone, and this process has not taken notice yet."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not self.flow.read_paused and bool(poll.poll(0))

    def _make_room(self) -> None:
        """End the connection that has waited longest, or this new one if all have sent something."""
        oldest = islice(self._limits.waiting, MAX_CANDIDATES)
        unused = next((one for one in oldest if not one._has_unread_bytes()), self)
        message = (
            f"The server has {self._limits.max_connections} connections, as many as it takes: try again in 1 "
            "s."
        )
        headers = {"retry-after": "1", "connection": "close"}
        unused._end(
            message,
            ApiError(429, message, type="rate_limit_error", code="too_many_connections", headers=headers),
        )

    def _end(self, message: str, error: ApiError | None = None) -> None:
        """Tell the client why, and close. error: what to answer; 408 if it is left out."""
        self._limits.waiting.pop(self, None)
        if self.transport.is_closing():
            return
        if self._waits_for == "head" or (self._is_answering and not self.cycle.response_started):
            error = error or ApiError(408, message, code="request_timeout", headers={"connection": "close"})
            response = error_response(error)
            status = f"{error.status} {HTTPStatus(error.status).phrase}".encode()
            head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + msgspec.json.encode(error.body)
            )
        self.transport.close()

    def _stalled(self) -> None:
        logger.warning(
            "A client has not read on for %g s: its connection is closed.", self._limits.write_seconds
        )
        self.transport.abort()
