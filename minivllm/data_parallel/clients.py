"""The clients of several engine processes:
like those of one, so that a frontend does not know how many there are.

An engine that dies costs its own requests.
It is started again beside the others, and gets requests when it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from queue import SimpleQueue
from typing import Any

from minivllm.config import EngineConfig
from minivllm.data_parallel.calls import (
    CHANGING,
    EMPTYING,
    STARTED_AGAIN,
    StandingOrders,
    check_call,
    combine,
)
from minivllm.data_parallel.policy import RoutingPolicy
from minivllm.data_parallel.replicas import Connect, Replica
from minivllm.data_parallel.router import Router
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient, WaitingClient
from minivllm.engine_process.protocol.clients import DeathListener
from minivllm.engine_process.protocol.pixels import NO_PIXELS, PixelAnswers
from minivllm.errors import EngineDeadError, EngineLostError, MinivllmError
from minivllm.messages import EngineOutput, EngineRequest, FinishReason

logger = logging.getLogger(__name__)

OnOutputs = Callable[[list[EngineOutput]], Awaitable[None]]


class AsyncDataParallelClient:
    """An AsyncEngineClient over several engines. connect: starts one more process of the same kind."""

    def __init__(
        self, connections: Sequence[EngineConnection], connect: Connect, policy: RoutingPolicy
    ) -> None:
        self._connect = connect
        self._replicas = [
            Replica(index, AsyncProcessClient(connection)) for index, connection in enumerate(connections)
        ]
        first = self._replicas[0].client
        self.config = _of_all(first.config, len(connections))
        self.model_vocab_size = first.model_vocab_size
        self.eos_token_ids = first.eos_token_ids
        groups = first.kv_groups
        self._router = Router(
            policy,
            len(connections),
            gcd(*(group.block_size for group in groups)),
            (groups[0].num_blocks - 1) * groups[0].block_size,
            self.config.cache.enable_prefix_caching,
        )
        self.dead_error: EngineDeadError | None = None
        self._answers = NO_PIXELS
        self._on_outputs: OnOutputs
        self._on_death: DeathListener = _ignore
        self._orders = StandingOrders()
        self._changing = asyncio.Lock()
        self._over = asyncio.Event()
        self._may_restart = True
        self._restarts: set[asyncio.Task[None]] = set()

    @property
    def num_engines(self) -> int:
        return len(self._replicas)

    @property
    def num_up(self) -> int:
        return sum(one.is_up for one in self._replicas)

    @property
    def num_restarts(self) -> list[int]:
        return [one.num_restarts for one in self._replicas]

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [one.client.pid for one in self._replicas]

    def serve_pixels(self, answers: PixelAnswers) -> None:
        """Answer the questions of all engines with these from now on."""
        self._answers = answers
        for one in self._replicas:
            one.client.serve_pixels(answers)

    def start(self, on_outputs: OnOutputs, on_death: DeathListener) -> None:
        """Begin to receive in the running event loop. on_death is called for every engine that dies, with its
        requests, and once at the end, also by ``close``."""
        self._on_outputs = on_outputs
        self._on_death = on_death
        for one in self._replicas:
            one.client.start(self._take_in, partial(self._take_death, one, one.client))

    async def _take_in(self, outputs: list[EngineOutput]) -> None:
        self._router.take_in(outputs)
        await self._on_outputs(outputs)

    # -- requests ----------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Raises EngineDeadError if no engine is left,
        EngineLostError if all that are left are starting again."""
        while self._router.up:
            index = self._router.add(request)
            try:
                self._replicas[index].client.add_request(request)
                return
            except EngineDeadError:
                # Its end will be reported in a moment, to the requests that it had. This one goes elsewhere.
                self._router.remove([request.request_id])
                self._router.engines[index].is_up = False
        raise self.dead_error or _none_up()

    def abort(self, request_ids: list[str]) -> None:
        for index, owned in self._router.remove(request_ids).items():
            with contextlib.suppress(EngineDeadError):  # then they have ended
                self._replicas[index].client.abort(owned)

    # -- calls -------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any) -> Any:
        """Ask all engines that are up, and make one answer of theirs.

        Raises RequestError or ModelError if one of them does,
        EngineDeadError or EngineLostError if none is up.
        """
        if method not in CHANGING:
            return await self._ask_all(method, args)
        async with self._changing:
            result = await self._ask_all(method, args)
            self._orders.note(method, args)
            return result

    async def _ask_all(self, method: str, args: tuple[Any, ...]) -> Any:
        check_call(self._router, method, args)
        asked, sent = [], []
        # All are sent before anything else can happen, so that no engine gets a request in between.
        for one in self._replicas:
            with contextlib.suppress(EngineDeadError):
                if one.is_up:
                    sent.append(one.client.send_call(method, *args))
                    asked.append(one)
        results = await asyncio.gather(*sent, return_exceptions=True)
        if method in EMPTYING:
            self._router.forget_prefixes()
        answers = [
            (one, result) for one, result in zip(asked, results) if not isinstance(result, BaseException)
        ]
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                await self._take_back(method, args, [one for one, _ in answers])
                raise error
        if not answers:
            raise self.dead_error or _none_up()
        return combine(method, [result for _, result in answers])

    async def _take_back(self, method: str, args: tuple[Any, ...], obeyed: Sequence[Replica]) -> None:
        """Some engines did what others refused: back to one state.
        Where only a start leads there, they start again."""
        for one in obeyed:
            if method in STARTED_AGAIN:
                logger.error(
                    "Engine %d obeyed %s, which another refused: it starts again.", one.index, method
                )
                self._router.engines[one.index].is_up = False
                one.client.kill()
            elif method == "add_lora" and args[0] not in self._orders.adapters:
                with contextlib.suppress(MinivllmError):
                    await one.client.call("remove_lora", args[0])

    async def call_engine(self, index: int, method: str, *args: Any) -> Any:
        """Ask one engine for something that changes nothing. Raises EngineDeadError while it is down."""
        return await self._replicas[index].client.call(method, *args)

    # -- the end -----------------------------------------------------------------------------------

    def _take_death(self, one: Replica, client: AsyncProcessClient, error: EngineDeadError) -> None:
        """A process has ended. One that was just starting is seen to by ``_restart``."""
        if self._over.is_set() or client is not one.client or not one.is_up:
            return
        one.died()
        if self.config.shares_experts:  # none can take a step without the others
            for other in self._replicas:
                other.died()
                other.client.kill()
        lost = self._router.lose(one.index)
        num_up = self.num_up
        if num_up == 0 and (self.config.shares_experts or not self._may_restart):
            self._give_up(error)
            return
        logger.error(
            "Engine %d has died, and %d requests with it; %d of %d serve on. %s",
            one.index,
            len(lost),
            num_up,
            self.num_engines,
            error,
        )
        if self._may_restart:
            task = asyncio.get_running_loop().create_task(self._restart(one))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
        self._on_death(
            EngineLostError(f"The engine that worked on this request has died: {error}"), set(lost)
        )

    def _give_up(self, error: EngineDeadError) -> None:
        """No engine serves, and none will."""
        self.dead_error = error
        self._stop_restarts()
        self._on_death(error)

    async def _restart(self, one: Replica) -> None:
        """Start a dead engine again, however often it takes.
        It is the end if none is up and none starts again."""
        await one.client.close()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), one.next_pause())
            if self._over.is_set():
                return
            client: AsyncProcessClient | None = None
            try:
                client = await one.start(self._connect)
                client.serve_pixels(self._answers)
                client.start(self._take_in, partial(self._take_death, one, client))
                async with self._changing:
                    for method, args in self._orders:
                        await client.call(method, *args)
                    if client.dead_error is not None:  # it has died already, and that was told to no one
                        raise client.dead_error
                    if not self._over.is_set():
                        one.serves_again(client)
                        self._router.engines[one.index].is_up = True
                        logger.warning("Engine %d serves again.", one.index)
                        return
            except Exception as error:
                if not self._over.is_set():
                    logger.error("Engine %d does not start again: %s", one.index, error)
                    one.does_start = False
                    if not any(other.does_start for other in self._replicas):
                        self._give_up(EngineDeadError(f"No engine is left, and none starts again: {error}"))
            finally:
                if client is not None and client is not one.client:
                    await client.close()

    def _stop_restarts(self) -> None:
        self._over.set()
        for one in self._replicas:
            one.give_up()

    async def close(self) -> None:
        """End the engine processes; pending calls raise EngineDeadError. Closing twice is fine."""
        self._stop_restarts()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(one.client.close() for one in self._replicas))
        self.dead_error = self.dead_error or EngineDeadError("The engine is closed: make a new one.")
        on_death, self._on_death = self._on_death, _ignore
        on_death(self.dead_error)

    def kill(self) -> None:
        """Kill the engine processes; ``close`` then has nothing to wait for."""
        self._may_restart = False
        for one in self._replicas:
            one.give_up()
            one.client.kill()

    def terminate(self) -> None:
        """End the engine processes before ``start``. Blocks until they have ended."""
        if self.config.shares_experts:
            self.kill()  # one after the other they would wait for one another
        for one in self._replicas:
            one.client.terminate()


def _none_up() -> EngineLostError:
    return EngineLostError("No engine is up: all are being started again. Send the request again later.")


def _ignore(error: EngineDeadError, request_ids: Collection[str] | None = None) -> None:
    """There is no listener yet, or none any more."""


def _of_all(config: EngineConfig, num_engines: int) -> EngineConfig:
    """The configuration for a frontend: running requests and tokens per step of all engines together."""
    limits = config.scheduler
    together = replace(
        limits,
        max_num_seqs=num_engines * limits.max_num_seqs,
        max_num_batched_tokens=num_engines * limits.max_num_batched_tokens,
    )
    return replace(config, scheduler=together)


class DataParallelClient(WaitingClient):
    """An EngineClient over several engines:
    AsyncDataParallelClient with an event loop of its own, in a thread.

    Requests of an engine that dies end with an error; the others do not notice.
    """

    def __init__(
        self, connections: Sequence[EngineConnection], connect: Connect, policy: RoutingPolicy
    ) -> None:
        super().__init__()
        self._client = client = AsyncDataParallelClient(connections, connect, policy)
        self.config = client.config
        self.model_vocab_size = client.model_vocab_size
        self.eos_token_ids = client.eos_token_ids
        self._dead_error: EngineDeadError | None = None
        self._news: SimpleQueue[list[EngineOutput] | EngineDeadError] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, client, self._loop, thread)
        self._in_loop(client.start, partial(_hand_over, self._news), partial(_tell_death, self._news))

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return self._client.pids

    def serve_pixels(self, answers: PixelAnswers) -> None:
        self._in_loop(self._client.serve_pixels, answers)

    def add_request(self, request: EngineRequest) -> None:
        self._in_loop(self._client.add_request, request)
        self._unfinished.add(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        self._in_loop(self._client.abort, request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        """Wait for the outputs of some engine's next step; an empty list if no request is unfinished."""
        if not self._unfinished:
            return []
        news = self._dead_error or self._news.get()
        if isinstance(news, EngineDeadError):
            self._dead_error = news
            raise news
        self._note_finished(news)
        return news

    def call(self, method: str, *args: Any) -> Any:
        """See AsyncDataParallelClient."""
        return self._run(self._client.call(method, *args))

    def close(self) -> None:
        self._close()

    def _in_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return self._run(call())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if not self._close.alive:
            coroutine.close()
            raise EngineDeadError("The engine is closed: make a new one.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _hand_over(news: SimpleQueue[Any], outputs: list[EngineOutput]) -> None:
    news.put(outputs)


def _tell_death(
    news: SimpleQueue[Any], error: EngineDeadError, request_ids: Collection[str] | None = None
) -> None:
    if request_ids is None:
        news.put(error)
    else:
        reason = str(error)
        news.put(
            [
                EngineOutput(request_id=one, finish_reason=FinishReason.ERROR, error=reason)
                for one in request_ids
            ]
        )


def _end(client: AsyncDataParallelClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(client.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
