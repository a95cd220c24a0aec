"""A consumer's knowledge of what its producers hold, as they announce it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import Event, Thread

from minivllm.kv_transfer.lookup.gate import Gate
from minivllm.kv_transfer.lookup.handshake import HandshakeError, Purpose
from minivllm.kv_transfer.lookup.lookup_server import SIGN_OF_LIFE_SECONDS
from minivllm.kv_transfer.lookup.pipe import Address, News, Pipe

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
SILENCE_SECONDS = 3 * SIGN_OF_LIFE_SECONDS
"""After so long without a sign of life a producer counts as gone."""
MAX_KEYS = 2**20
"""Blocks of one producer that are remembered."""


class Catalogue:
    """One thread for each producer: connects, listens, connects again. Nobody waits for it."""

    def __init__(self, peers: Sequence[Address], gate: Gate) -> None:
        self._gate = gate
        self._held: list[set[bytes]] = [set() for _ in peers]
        self._pipes: dict[int, Pipe] = {}
        self._closed = Event()
        for index, peer in enumerate(peers):
            Thread(target=self._follow, args=(index, peer), name="kv-catalogue", daemon=True).start()

    def find(self, key: bytes) -> int | None:
        """A producer that holds the block, by its number; None: nobody does."""
        return next((index for index, held in enumerate(self._held) if key in held), None)

    def forget(self, key: bytes) -> None:
        """A block did not come: it is not asked for again until it is announced anew."""
        for held in self._held:
            held.discard(key)

    def close(self) -> None:
        self._closed.set()
        for pipe in list(self._pipes.values()):
            pipe.close()

    def _follow(self, index: int, peer: Address) -> None:
        problem = ""
        while not self._closed.is_set():
            try:
                self._pipes[index] = self._gate.connect(peer, Purpose.NEWS, time.monotonic() + self._gate.timeout)
                logger.info("Connected to the producer at %s.", peer.text)
                problem = ""
                self._listen(index)
            except (OSError, ValueError) as error:
                kind = str(error) if isinstance(error, HandshakeError) else "unreachable"
                if kind != problem and not self._closed.is_set():
                    logger.warning("No blocks come from the producer at %s: %s.", peer.text, error)
                problem = kind
            finally:
                self._held[index] = set()
                pipe = self._pipes.pop(index, None)
                if pipe is not None:
                    pipe.close()
            self._closed.wait(RETRY_SECONDS)

    def _listen(self, index: int) -> None:
        while not self._closed.is_set():
            news = self._pipes[index].receive_message(News, time.monotonic() + SILENCE_SECONDS)
            held = self._held[index]
            held.difference_update(news.gone)
            held.update(news.came)
            if len(held) > MAX_KEYS:
                raise ValueError(f"it announces more than {MAX_KEYS} blocks")
