"""The clients of an engine process:
the synchronous one of ``LLM(..., multiprocess=True)``, and that of ``AsyncLLM``.

Silence is counted in ticks and not by the clock, so that an event loop which was blocked, or a machine which
slept, does not take itself for a hung engine.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from minivllm.engine_process.connection import DIED_STATUS, FINAL_MESSAGE_SECONDS, EngineConnection
from minivllm.engine_process.protocol import frames
from minivllm.engine_process.protocol.pixels import NO_PIXELS, PixelAnswers, WantPixels
from minivllm.errors import EngineDeadError
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats

TICK_SECONDS, ASYNC_TICK_SECONDS = 1.0, 0.5
"""How often a client that waits, and one in an event loop, asks for a sign of life."""


class _Client:
    """What both clients hold. pid: process id of the engine."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self.pid = connection.process.pid
        ready = connection.ready
        self.config = ready.config
        self.kv_groups = ready.kv_groups
        self.model_vocab_size = ready.model_vocab_size
        self.eos_token_ids = ready.eos_token_ids
        self._answers = NO_PIXELS

    def serve_pixels(self, answers: PixelAnswers) -> None:
        """Answer the engine's questions with these from now on."""
        self._answers = answers


class WaitingClient(ABC):
    """What clients have in common whose callers wait for outputs:
    requests that are not finished, and typed calls."""

    def __init__(self) -> None:
        self._unfinished: set[str] = set()

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call one of Administration's methods. Raises RequestError if it refuses."""

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def _note_finished(self, outputs: list[EngineOutput]) -> None:
        self._unfinished.difference_update(
            output.request_id for output in outputs if output.finish_reason is not None
        )

    def stats(self) -> SchedulerStats:
        return msgspec.convert(self.call("stats"), SchedulerStats)

    def reset_prefix_cache(self) -> bool:
        return bool(self.call("reset_prefix_cache"))


class ProcessClient(_Client, WaitingClient):
    """Like InProcessClient, for a core that steps by itself.
    Every method raises EngineDeadError once it is dead."""

    def __init__(self, connection: EngineConnection) -> None:
        _Client.__init__(self, connection)
        WaitingClient.__init__(self)
        self._buffered: deque[list[EngineOutput]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(connection.pull, zmq.POLLIN)
        self._poller.register(connection.life_fd, zmq.POLLIN)

    def add_request(self, request: EngineRequest) -> None:
        self._connection.add_request(request)
        self._unfinished.add(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        self._connection.abort(request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        """Wait for the next step's outputs; an empty list if no request is unfinished."""
        while self._unfinished and not self._buffered:
            self._receive()
        outputs = self._buffered.popleft() if self._buffered else []
        self._note_finished(outputs)
        return outputs

    def call(self, method: str, *args: Any) -> Any:
        call_id = self._connection.call(method, args)
        while True:
            result = self._receive()
            if result is not None and result.call_id == call_id:
                if result.error is not None:
                    raise result.error.exception()
                return result.value

    def close(self) -> None:
        self._connection.close()

    def _receive(self) -> frames.Result | None:
        """Wait for one message. Outputs are buffered, a Result is returned."""
        connection = self._connection
        if connection.dead_error is not None:
            raise connection.dead_error
        num_silent_ticks = 0
        while not (events := dict(self._poller.poll(round(TICK_SECONDS * 1000)))):
            # Through the busy loop and back: a core that hangs in a step does not answer.
            if num_silent_ticks == 0:
                connection.call("heartbeat", ())
            num_silent_ticks += 1
            if num_silent_ticks * TICK_SECONDS >= connection.args.heartbeat_timeout:
                raise connection.hung()
        if connection.pull not in events:
            raise connection.death()
        message = connection.decode(connection.pull.recv())
        if isinstance(message, frames.Died):
            raise connection.died(message)
        if isinstance(message, frames.Outputs):
            self._buffered.append(message.outputs)
        if isinstance(message, WantPixels):
            for pixels in self._answers.each(message.digests):
                connection.send(pixels)
        return message if isinstance(message, frames.Result) else None


class AsyncProcessClient(_Client):
    """Sends at once, and hands outputs to a coroutine from a single task.

    ``start`` must be called in the event loop before anything is awaited.
    """

    num_engines, num_up, num_restarts = 1, 1, (0,)

    def __init__(self, connection: EngineConnection) -> None:
        super().__init__(connection)
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._on_death: Callable[[EngineDeadError], None] = lambda error: None
        self._frames: deque[bytes] = deque()
        self._has_frames = asyncio.Event()

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._connection.dead_error

    def start(
        self,
        on_outputs: Callable[[list[EngineOutput]], Awaitable[None]],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        """Begin to receive in the running event loop. on_death is called once, also by ``close``."""
        self._on_death = on_death
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.life_fd, self._life_ended)
        loop.add_reader(self._connection.pull.FD, self._take_frames)
        self._take_frames()
        self._tasks = [loop.create_task(self._receive(on_outputs)), loop.create_task(self._watch_heartbeat())]

    def add_request(self, request: EngineRequest) -> None:
        """Raises EngineDeadError."""
        self._connection.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """Raises EngineDeadError."""
        self._connection.abort(request_ids)

    def send_call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Send a call now, behind what was sent before it; its result. Raises EngineDeadError."""
        call_id = self._connection.call(method, args)
        future = self._results[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._results.pop(call_id))
        return future

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of Administration's methods. Raises RequestError if it refuses, or EngineDeadError."""
        return await self.send_call(method, *args)

    async def call_engine(self, index: int, method: str, *args: Any) -> Any:
        """``call`` for one of ``num_engines``, of which there is one here."""
        return await self.call(method, *args)

    async def close(self) -> None:
        """End the engine process; pending calls raise EngineDeadError. Closing twice is fine."""
        await asyncio.gather(*self._stop_receiving(), return_exceptions=True)
        # No task reads the sockets now, so another thread may wait for the process to end.
        await asyncio.to_thread(self._connection.close)
        if self.dead_error is not None:
            self._die(self.dead_error)

    def kill(self) -> None:
        """Kill the engine process; ``close`` then has nothing to wait for."""
        self._connection.process.kill()

    def terminate(self) -> None:
        """End the engine process before ``start``. Blocks until it has ended."""
        self._connection.close()

    def _stop_receiving(self) -> list[asyncio.Task[None]]:
        tasks, self._tasks = self._tasks, []
        if tasks:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._connection.life_fd)
            loop.remove_reader(self._connection.pull.FD)
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    def _die(self, error: EngineDeadError) -> None:
        self._stop_receiving()
        for future in self._results.values():
            if not future.done():
                future.set_exception(error)
        on_death, self._on_death = self._on_death, lambda error: None
        on_death(error)

    def _take_frames(self) -> None:
        """ZeroMQ's descriptor tells of changes only, so everything that is there must be taken each time."""
        try:
            while True:
                self._frames.append(self._connection.pull.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        if self._frames:
            self._has_frames.set()

    async def _receive(self, on_outputs: Callable[[list[EngineOutput]], Awaitable[None]]) -> None:
        while True:
            if not self._frames:
                self._has_frames.clear()
                await self._has_frames.wait()
            message = self._connection.decode(self._frames.popleft())
            if isinstance(message, frames.Outputs):
                try:
                    await on_outputs(message.outputs)
                except Exception as error:
                    # Going on would leave some streams waiting for ever, and it is not known which.
                    self._die(self._connection.died(frames.Died(frames.ErrorInfo.of(error))))
                    raise
            elif isinstance(message, frames.Result):
                self._take_result(message)
            elif isinstance(message, WantPixels):
                self._tasks.append(asyncio.get_running_loop().create_task(self._answer_all(message.digests)))
            elif isinstance(message, frames.Died):
                self._die(self._connection.died(message))
                return

    async def _answer_all(self, digests: list[bytes]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        with suppress(EngineDeadError):
            async for pixels in self._answers.from_threads(digests):
                self._connection.send(pixels)

    def _take_result(self, result: frames.Result) -> None:
        future = self._results.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.value)
        else:
            future.set_exception(result.error.exception())

    def _life_ended(self) -> None:
        """The engine process ends. What it still said is on its way to ``_receive``."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection.life_fd)
        self._tasks.append(loop.create_task(self._report_exit()))

    async def _report_exit(self) -> None:
        status = await asyncio.to_thread(self._connection.exit_status)
        deadline = time.monotonic() + FINAL_MESSAGE_SECONDS * (status == DIED_STATUS)
        while self.dead_error is None and time.monotonic() < deadline:
            await asyncio.sleep(FINAL_MESSAGE_SECONDS / 20)
            self._take_frames()  # also if a change of ZeroMQ's descriptor went by unseen
        await asyncio.sleep(0)
        self._die(self._connection.ended(status))

    async def _watch_heartbeat(self) -> None:
        """Ask for a sign of life through the busy loop: a core that hangs in a step does not answer."""
        while True:
            answer = asyncio.ensure_future(self.call("heartbeat"))
            num_silent_ticks = 0
            try:
                while not answer.done():
                    if num_silent_ticks * ASYNC_TICK_SECONDS >= self._connection.args.heartbeat_timeout:
                        self._die(await asyncio.to_thread(self._connection.hung))
                        return
                    await asyncio.sleep(ASYNC_TICK_SECONDS)
                    num_silent_ticks += 1
            finally:
                answer.cancel()  # no one waits for it any more
