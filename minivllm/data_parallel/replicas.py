"""Starting engines that share a machine, and starting one again that has died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from minivllm.config import EngineArgs
from minivllm.distributed.lockstep import open_seats
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient

logger = logging.getLogger(__name__)

Connect = Callable[[int], EngineConnection]
"""Starts the engine process of this number, and does not wait for it."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the second try to start a dead engine; twice as long before every later one, up to the
longest. The first try comes at once."""
STABLE_SECONDS = 60.0
"""An engine that has lived so long begins with the first try again."""


def start_engines(connect: Connect, count: int) -> list[EngineConnection]:
    """Start so many engines and wait until all of them serve.
    If one cannot, none is left, and its error is raised.

    The first one starts alone: what it has to compile is on disk for the others.
    """
    connections: list[EngineConnection] = []
    try:
        for number in range(count):
            connections.append(connect(number))
            if number == 0:
                connections[0].wait_until_ready()
        for connection in connections[1:]:
            connection.wait_until_ready()
    except BaseException:
        for connection in connections:
            connection.close()
        raise
    return connections


def start_together(connect: Callable[..., EngineConnection], args: EngineArgs) -> list[EngineConnection]:
    """Start engines that share experts, which cannot load or warm up without one another. If one cannot, none
    is left, and its error is raised. connect: starts the one of a seat."""
    seats = open_seats(args.data_parallel_size, args.num_workers)
    connections: list[EngineConnection] = []
    try:
        connections += (connect(seat.rank, seat=seat) for seat in seats)
        with ThreadPoolExecutor(len(connections)) as threads:
            waits = [threads.submit(one.wait_until_ready) for one in connections]
            for ready in as_completed(waits):
                if ready.exception() is not None:
                    for one in connections:
                        one.process.kill()
                    ready.result()
    except BaseException:
        for one in connections:
            one.process.kill()
            one.close()
        raise
    finally:
        seats[0].close()
    return connections


class Replica:
    """One engine, which may die and start again. client: of the process that runs now, or ran last.
    does_start: the last try to start it went well."""

    def __init__(self, index: int, client: AsyncProcessClient) -> None:
        self.index = index
        self.client = client
        self.is_up = self.does_start = True
        self.num_restarts = 0
        self._num_tries = 0
        self._up_since = time.monotonic()
        self._starting: EngineConnection | None = None
        self._is_over = False

    def next_pause(self) -> float:
        """Seconds to wait before the next try to start it."""
        tries, self._num_tries = self._num_tries, self._num_tries + 1
        return 0.0 if tries == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 30))

    def died(self) -> None:
        """It serves no more."""
        self.is_up = False
        if time.monotonic() - self._up_since >= STABLE_SECONDS:
            self._num_tries = 0

    def serves_again(self, client: AsyncProcessClient) -> None:
        self.client = client
        self.is_up = True
        self.does_start = True
        self.num_restarts += 1
        self._up_since = time.monotonic()

    async def start(self, connect: Connect) -> AsyncProcessClient:
        """Start its process and wait until it serves. Raises what the engine raises."""

        def start() -> EngineConnection:
            self._starting = connection = connect(self.index)
            if self._is_over:
                connection.process.kill()
            connection.wait_until_ready()
            return connection

        try:
            return AsyncProcessClient(await asyncio.to_thread(start))
        finally:
            self._starting = None

    def give_up(self) -> None:
        """Let a start that is under way fail, and every later one."""
        self._is_over = True
        starting = self._starting
        if starting is not None:
            starting.process.kill()
