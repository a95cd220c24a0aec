"""``AsyncLLM``: many streams over one engine process, from one event loop. A server builds on it.

One task receives the engine's outputs for all streams. It only adds them to the state of each stream; a
reader gets all that has gathered there since its last read. So a slow reader merges deltas instead of
queueing them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, EngineDeadError, EngineLostError, RequestError
from minivllm.frontend.llm_engine import TextFrontend, load_model_tokenizer
from minivllm.messages import EngineOutput, FinishReason, LoRARequest, PrefixTree, RecentStep, SchedulerStats
from minivllm.processing.input_processor import PreparedRequest, Prompt
from minivllm.processing.output_processor import RequestState
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine_process.protocol.clients import AsyncEngineClient
    from minivllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLICE_SECONDS = 0.005
"""How long outputs are taken in before other tasks of the event loop get their turn."""
STATS_SECONDS = 0.8
"""How long an engine's figures are waited for. It answers between two steps, and not at all when it hangs."""
LONG_TEXT = 4096
"""Characters from which on tokenizing moves to a thread, where it does not hold up the event loop."""
NUM_IMAGE_THREADS = 2
"""That read the images of prompts: so many are decoded at a time. Texts do not wait for them."""


class _Stream:
    """A request, and the sign for its reader that there is something to read."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.has_news = asyncio.Event()
        self.error: Exception | None = None
        self.deadline: asyncio.TimerHandle | None = None

    def fail(self, error: Exception) -> None:
        if not self.request.finished:
            self.error = error
            self.has_news.set()


class AsyncLLM(TextFrontend):
    """Engine processes, mostly one, with text at both ends.
    An asynchronous context manager: leaving it ends them.

    Lives in the event loop that first uses it;
    only ``prepare`` and ``render_chat`` may be called from other threads.
    """

    def __init__(self, client: AsyncEngineClient, tokenizer: Tokenizer | None = None) -> None:
        if isinstance(client, (str, Path, EngineArgs)):
            raise ConfigError(
                f"AsyncLLM was given an object of type {type(client).__name__}, but takes a client of engine "
                'processes: call AsyncLLM.from_args(EngineArgs(model="smollm2")).'
            )
        super().__init__(client, tokenizer)
        self.client = client
        self._streams: dict[str, _Stream] = {}
        self._started = False
        self._image_threads = ThreadPoolExecutor(NUM_IMAGE_THREADS, thread_name_prefix="prompt-images")

    @classmethod
    def from_args(cls, args: EngineArgs) -> AsyncLLM:
        """Start an engine process and load the model; blocks until it is ready.
        Raises ConfigError or ModelError."""
        from minivllm.data_parallel.client import make_async_client

        if args.performance_mode is None:
            args = replace(args, performance_mode="interactivity")
        client = make_async_client(args)
        try:
            return cls(
                client, load_model_tokenizer(args, client.config.model_path, client.config.load_format)
            )
        except BaseException:
            client.terminate()
            raise

    def start(self) -> None:
        """Listen to the engine processes in the running event loop: their log lines, their death.
        The first use does so too."""
        if not self._started:
            self._started = True
            self.client.start(self._take_in, self._fail)

    def generate(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        lora: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one prompt, or of what ``prepare`` made of one; the last one is ``finished``.

        Closing the iterator, or cancelling the task that reads it, aborts the request. Reading slowly merges:
        a delta stream then gives larger deltas, a cumulative one fewer outputs.
        deadline: seconds from now; a request that has not finished by then ends with finish_reason "error"
        and an ``error`` that says so, after whatever it generated. lora: the adapter to use; one that is not
        loaded yet is loaded first (``add_lora`` does so earlier). Raises, while being read, RequestError for
        a prompt that cannot be served and EngineDeadError.
        """
        expires = None if deadline is None else time.monotonic() + deadline
        if isinstance(prompt, PreparedRequest):
            return self._stream(prompt, deadline, expires)
        prepare = partial(
            self.prepare,
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            lora=lora,
        )
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
            return self._stream(partial(self.in_image_thread, prepare), deadline, expires)
        is_long = isinstance(text, str) and len(text) > LONG_TEXT
        return self._stream(partial(asyncio.to_thread, prepare) if is_long else prepare, deadline, expires)

    async def in_image_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run ``prepare`` or ``render_chat`` of a prompt with images beside the event loop: it decodes them.

        Waits until one of NUM_IMAGE_THREADS threads is free. Raises what the work raises, or EngineDeadError.
        """
        if self.client.dead_error is not None:
            raise self.client.dead_error
        call = partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._image_threads, call)

    async def abort(self, request_id: str) -> None:
        """End a request early, by the caller's id or the internal one:
        its stream ends with finish_reason "abort"."""
        for stream in list(self._streams.values()):
            if request_id in (stream.request.request_id, stream.request.internal_id):
                self._end(stream, FinishReason.ABORT)

    @property
    def num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished_requests

    @property
    def is_dead(self) -> bool:
        return self.client.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead, None while it lives."""
        return self.client.dead_error

    @property
    def num_engines(self) -> int:
        return self.client.num_engines

    @property
    def num_restarts(self) -> Sequence[int]:
        """How often each engine was started again after a death."""
        return self.client.num_restarts

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine process ended, or was killed because its busy loop hung;
        EngineLostError while all of several engines are being started again."""
        self.start()
        if self.client.dead_error is not None:
            raise self.client.dead_error
        if not self.client.num_up:
            raise EngineLostError("All engines have died, and are being started again.")

    async def stats(self) -> SchedulerStats:
        """Of all engines together."""
        return msgspec.convert(await self._call("stats"), SchedulerStats)

    async def engine_stats(self) -> list[SchedulerStats | None]:
        """Of each engine; None for one that is down, or does not answer within STATS_SECONDS."""
        return await asyncio.gather(
            *(self._figures(index, SchedulerStats, "stats") for index in range(self.client.num_engines))
        )

    async def recent_steps(self, after: int = 0, engine: int = 0) -> list[RecentStep]:
        """The decisions of an engine's scheduler in its last few hundred steps,
        those with numbers above ``after``.

        Empty if the engine is down, or does not answer within STATS_SECONDS.
        """
        return await self._figures(engine, list[RecentStep], "recent_steps", after) or []

    async def prefix_tree(self, limit: int = 100, engine: int = 0) -> PrefixTree | None:
        """The prefix cache of an engine as a tree, at most ``limit`` nodes, those near the roots first.

        None if the engine is down, or does not answer within STATS_SECONDS.
        Raises RequestError for a limit that is not from 1 to 1000.
        """
        return await self._figures(engine, PrefixTree, "prefix_tree", limit)

    async def _figures(self, engine: int, kind: type[T], method: str, *args: Any) -> T | None:
        self.start()
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return msgspec.convert(await self.client.call_engine(engine, method, *args), kind)
        except (EngineDeadError, TimeoutError):
            return None

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are still using the cache."""
        return bool(await self._call("reset_prefix_cache"))

    async def add_lora(self, lora: LoRARequest) -> None:
        """Load an adapter before it is needed. Raises RequestError, in a sentence, if it cannot be served."""
        self.check_lora(lora)
        await self._call("add_lora", lora.name, lora.path)

    async def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known.
        Raises RequestError while unfinished requests use it."""
        return bool(await self._call("remove_lora", name))

    async def list_loras(self) -> list[LoRARequest]:
        """All known adapters, least recently used first."""
        return [LoRARequest(name, lora_path=path) for name, path in await self._call("list_loras")]

    async def pause(self) -> None:
        """Finish the running step and run no more; requests are taken in, and wait."""
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the model: level 1 keeps the weights in host memory, level 2 drops them.

        The KV cache goes in both, and requests are refused until ``wake_up``.
        Raises RequestError while some are unfinished.
        """
        await self._call("sleep", level)

    async def wake_up(self) -> None:
        """Undo ``sleep``. Raises ModelError, and goes on sleeping,
        if dropped weights cannot be read again."""
        await self._call("wake_up")

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def update_weights(self, path: str) -> None:
        """Replace the weights by those of a directory of safetensors files, and forget all cached prefixes.

        Raises RequestError while requests are unfinished, ModelError for weights of another architecture.
        """
        await self._call("update_weights", path)

    async def start_profile(self, directory: str) -> None:
        """Let the workers record what PyTorch runs, until ``stop_profile``. Raises RequestError."""
        await self._call("start_profile", directory)

    async def stop_profile(self) -> list[str]:
        """Paths of the traces, one per worker; ui.perfetto.dev opens them."""
        return list(await self._call("stop_profile"))

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call adapter_shapes, memory_bytes or weight_checksums on every worker; their results."""
        return list(await self._call("collective_rpc", method, list(args)))

    async def num_recompilations(self) -> int:
        """Regions compiled after warm-up, which should stay at 0."""
        return int(await self._call("num_recompilations"))

    def kill(self) -> None:
        """End the engine process at once, without letting it finish its step; ``close`` comes after."""
        self.client.kill()

    async def close(self) -> None:
        """End the engine process; open streams raise EngineDeadError. Closing twice is fine."""
        await self.client.close()
        self._image_threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncLLM:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- one stream --------------------------------------------------------------------------------

    async def _stream(
        self,
        request: PreparedRequest | Callable[..., PreparedRequest | Awaitable[PreparedRequest]],
        deadline: float | None,
        expires: float | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """request: prepared, or what prepares it; its arrival is when the stream is first read."""
        if not isinstance(request, PreparedRequest):
            prepared = request(arrival_time=time.monotonic())
            request = prepared if isinstance(prepared, PreparedRequest) else await prepared
        stream = self._submit(request)
        if expires is not None:
            error = f"The request did not finish within its deadline of {deadline:g} s."
            stream.deadline = asyncio.get_running_loop().call_later(
                max(0.0, expires - time.monotonic()), self._end, stream, FinishReason.ERROR, error
            )
        try:
            while True:
                await stream.has_news.wait()
                stream.has_news.clear()
                if stream.error is not None:
                    raise stream.error
                output = stream.request.make_output()
                yield output
                if output.finished:
                    return
        finally:
            self._forget(stream)

    def _submit(self, prepared: PreparedRequest) -> _Stream:
        self.start()
        if self.client.dead_error is not None:
            raise self.client.dead_error
        if prepared.internal_id in self._streams:
            raise RequestError(
                f"Request {prepared.request_id!r} is being generated already: prepare it again."
            )
        stream = self._streams[prepared.internal_id] = _Stream(self.output_processor.add_request(prepared))
        try:
            for sequence in prepared.sequences:
                self.client.add_request(sequence)
        except BaseException:
            self._forget(stream)
            raise
        return stream

    def _end(self, stream: _Stream, reason: FinishReason, error: str | None = None) -> None:
        """End a request that is not finished; its reader gets one last output."""
        if not stream.request.finished and stream.error is None:
            self._abort_in_engine(self.output_processor.end(stream.request, reason, error))
            stream.has_news.set()

    def _forget(self, stream: _Stream) -> None:
        """Its reader has gone: nothing may be left, here or in the engine."""
        if stream.deadline is not None:
            stream.deadline.cancel()
        self._streams.pop(stream.request.internal_id, None)
        self._abort_in_engine(self.output_processor.discard(stream.request))

    def _abort_in_engine(self, sequence_ids: list[str]) -> None:
        if sequence_ids and self.client.dead_error is None:
            try:
                self.client.abort(sequence_ids)
            except EngineDeadError:
                logger.debug("The engine died before %d sequences could be aborted.", len(sequence_ids))

    # -- all streams -------------------------------------------------------------------------------

    async def _call(self, method: str, *args: Any) -> Any:
        self.start()
        return await self.client.call(method, *args)

    async def _take_in(self, outputs: list[EngineOutput]) -> None:
        """Add the outputs of a step to all streams; other tasks get their turn in between."""
        now, sequence_ids_to_abort = time.monotonic(), list[str]()
        slice_start = time.perf_counter()
        for output in outputs:
            request = self.output_processor.take_in(output, now, sequence_ids_to_abort)
            if request is not None and (stream := self._streams.get(request.internal_id)) is not None:
                stream.has_news.set()
            if time.perf_counter() - slice_start > SLICE_SECONDS:
                await asyncio.sleep(0)
                slice_start = time.perf_counter()
        self._abort_in_engine(sequence_ids_to_abort)

    def _fail(self, error: EngineDeadError, request_ids: Collection[str] | None = None) -> None:
        """An engine has died with these sequences; None: with all, for there is no engine any more."""
        for stream in self._streams.values():
            if request_ids is None or any(one.sequence_id in request_ids for one in stream.request.sequences):
                stream.fail(error)
