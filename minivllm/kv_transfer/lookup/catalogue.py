"""A consumer's knowledge of what its producers hold, as they announce it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain
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


class _Worker:
    """A worker of a producer: where it listens, and the blocks whose parts it has announced."""

    def __init__(self, address: Address, gate: Gate) -> None:
        self.address = address
        self.gate = gate
        self.held: set[bytes] = set()
        self.pipe: Pipe | None = None


class Catalogue:
    """One thread for each worker of each producer: connects, listens, connects again. No caller waits for it.

    gates: of each rank of this engine, which takes its parts from the same rank of a producer.
    """

    def __init__(self, peers: Sequence[Address], gates: Sequence[Gate]) -> None:
        """Raises ConfigError if there are no addresses for so many ranks."""
        self._producers = [
            [_Worker(peer.beside(rank), gate) for rank, gate in enumerate(gates)] for peer in peers
        ]
        self._closed = Event()
        for worker in chain.from_iterable(self._producers):
            Thread(target=self._follow, args=(worker,), name="kv-catalogue", daemon=True).start()

    def find(self, key: bytes) -> int | None:
        """A producer of which every worker holds its part of the block, by its number;
        None: there is none."""
        for number, workers in enumerate(self._producers):
            if all(key in worker.held for worker in workers):
                return number
        return None

    def forget(self, key: bytes) -> None:
        """A block did not come: it is not asked for again until it is announced anew."""
        for worker in chain.from_iterable(self._producers):
            worker.held.discard(key)

    def close(self) -> None:
        self._closed.set()
        for worker in chain.from_iterable(self._producers):
            pipe = worker.pipe
            if pipe is not None:
                pipe.close()

    def _follow(self, worker: _Worker) -> None:
        problem, peer, gate = "", worker.address, worker.gate
        while not self._closed.is_set():
            try:
                worker.pipe = gate.connect(peer, Purpose.NEWS, time.monotonic() + gate.timeout)
                logger.info("Connected to the producer at %s.", peer.text)
                problem = ""
                self._listen(worker, worker.pipe)
            except (OSError, ValueError) as error:
                kind = str(error) if isinstance(error, HandshakeError) else "unreachable"
                if kind != problem and not self._closed.is_set():
                    logger.warning("No blocks come from the producer at %s: %s.", peer.text, error)
                problem = kind
            finally:
                worker.held = set()
                pipe, worker.pipe = worker.pipe, None
                if pipe is not None:
                    pipe.close()
            self._closed.wait(RETRY_SECONDS)

    def _listen(self, worker: _Worker, pipe: Pipe) -> None:
        while not self._closed.is_set():
            news = pipe.receive_message(News, time.monotonic() + SILENCE_SECONDS)
            held = worker.held
            held.difference_update(news.gone)
            held.update(news.came)
            if len(held) > MAX_KEYS:
                raise ValueError(f"it announces more than {MAX_KEYS} blocks")
