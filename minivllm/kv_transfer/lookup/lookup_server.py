"""A producer's end: consumers connect, hear what is in the buffer, and take blocks out of it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Condition, Lock, Thread

from minivllm.kv_transfer.lookup.gate import Gate
from minivllm.kv_transfer.lookup.handshake import HandshakeError, Purpose
from minivllm.kv_transfer.lookup.lookup_buffer import LookupBuffer
from minivllm.kv_transfer.lookup.pipe import Address, DropSelect, News, Pipe

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
MAX_NEWS_KEYS = 2**14
"""Of one message, which then takes half a megabyte."""
SIGN_OF_LIFE_SECONDS = 2.0
FOREVER = float("inf")


class LookupServer:
    """Listens until it is closed, one thread per connection.
    Whatever a consumer does ends its own connection only."""

    def __init__(self, address: Address, gate: Gate, buffer: LookupBuffer) -> None:
        """Raises ConfigError if it cannot listen there."""
        self._gate = gate
        self._buffer = buffer
        self._address = address
        self._listener = address.listen()
        self._pipes: set[Pipe] = set()
        self._lock = Lock()
        self._num_open = 0
        self._is_closed = False
        Thread(target=self._accept, name="kv-server", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            pipes = list(self._pipes)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._address.path:
            Path(self._address.path).unlink(missing_ok=True)
        for pipe in pipes:
            pipe.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.warning("A consumer could not connect to %s: %s.", self._address.text, error)
                    time.sleep(0.1)  # such as too many open files, which takes others to end
                continue
            if self._num_open >= MAX_CONNECTIONS:
                connection.close()
                continue
            with self._lock:
                self._num_open += 1
            Thread(target=self._serve, args=(connection,), name="kv-consumer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        pipe = None
        try:
            pipe = self._gate.wrap(connection)
            with self._lock:
                self._pipes.add(pipe)
            purpose = self._gate.accept(pipe)
            (self._tell if purpose == Purpose.NEWS else self._answer)(pipe)
        except HandshakeError as error:
            logger.warning("A consumer was turned away from %s: %s.", self._address.text, error)
        except ValueError as error:
            logger.warning("A consumer of %s was disconnected: %s.", self._address.text, error)
        except OSError as error:
            logger.debug("A consumer of %s has gone: %s.", self._address.text, error)
        finally:
            (pipe or connection).close()
            with self._lock:
                self._num_open -= 1
                if pipe is not None:
                    self._pipes.discard(pipe)

    def _answer(self, pipe: Pipe) -> None:
        """Send what is asked for, until the consumer goes.
        One that does not read in time loses its connection."""
        while not self._is_closed:
            request = pipe.receive_message(DropSelect, FOREVER)
            deadline = time.monotonic() + self._gate.timeout
            for key in request.keys:
                contents = self._buffer.drop_select(key)
                if contents is None:
                    pipe.send_tensor(key, None, deadline)
                    break
                contents.wait()
                pipe.send_tensor(key, contents.data, deadline)

    def _tell(self, pipe: Pipe) -> None:
        """Send what comes and goes, until the consumer goes."""
        news = PendingNews()
        self._buffer.subscribe(news.note)
        try:
            while not self._is_closed:
                for message in news.take(SIGN_OF_LIFE_SECONDS):
                    pipe.send_message(message, time.monotonic() + self._gate.timeout)
        finally:
            self._buffer.unsubscribe(news.note)


class PendingNews:
    """News that one consumer has not been told yet; for each block only the latest."""

    def __init__(self) -> None:
        self._is_here: dict[bytes, bool] = {}
        self._condition = Condition()

    def note(self, came: Sequence[bytes], gone: Sequence[bytes]) -> None:
        with self._condition:
            self._is_here.update(dict.fromkeys(gone, False))
            self._is_here.update(dict.fromkeys(came, True))
            self._condition.notify()

    def take(self, seconds: float) -> list[News]:
        """The messages to send; after so many seconds without news a single empty one."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_here, seconds)
            changes, self._is_here = list(self._is_here.items()), {}
        parts = [changes[start : start + MAX_NEWS_KEYS] for start in range(0, len(changes), MAX_NEWS_KEYS)]
        return [
            News(came=[key for key, here in part if here], gone=[key for key, here in part if not here])
            for part in parts or [[]]
        ]
