"""The service that all endpoints use: the engine, admission, the thread for text work, prepared requests."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from minivllm.errors import RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.messages import FinishReason
from minivllm.metrics.prometheus import RequestRecorder, ServerMetrics
from minivllm.metrics.tracing import make_tracing
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import RequestOutput
from minivllm.server.bodies.errors import invalid, shutting_down, timed_out, unsupported
from minivllm.server.limits.admission import Admission, Ticket
from minivllm.server.limits.middleware import LARGE_BODY_BYTES, body_bytes
from minivllm.server.parsers.choose import choose_answer_format
from minivllm.server.service.models import ServedModels
from minivllm.server.service.settings import ServerSettings
from minivllm.tokenizer.detokenizer import TokenDecoder

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUEUE_POLL_SECONDS = 0.02
MOST_READING_IMAGES = 64
"""Requests with images that are decoded, or wait for it; further ones are refused."""


class Service:
    """One engine and the names it is served under."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.max_model_len = engine.config.scheduler.max_model_len
        names = settings.served_model_names or (engine.config.model,)
        self.models = ServedModels(engine, names, settings.lora_adapters, settings.lora_directory)
        self.started_at = int(time.time())
        self.metrics = ServerMetrics()
        self.tracing = make_tracing(settings.otlp_endpoint)
        self.admission = Admission(
            engine.config.scheduler.max_num_seqs,
            settings.max_queued_requests,
            settings.max_queued_prompt_tokens,
        )
        self.chat_template = _chat_template(engine)
        self.answer_format = choose_answer_format(
            self.chat_template, settings.tool_call_parser, settings.reasoning_parser
        )
        self.token_decoder = TokenDecoder(engine.tokenizer.backend) if engine.has_tokenizer else None
        self._num_reading_images = 0
        # Text work must not stop the event loop, and large bodies must not keep small ones waiting.
        self._small_texts, self._large_texts = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"minivllm-{size}-texts")
            for size in ("small", "large")
        )

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.engine.images is not None

    async def in_image_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run text work of a request with images, which decodes them.
        Raises ApiError 429 if too many requests wait for that."""
        if self._num_reading_images >= MOST_READING_IMAGES:
            raise self.admission.full(
                f"{self._num_reading_images} requests with images wait for these to be decoded"
            )
        self._num_reading_images += 1
        try:
            return await self.engine.in_image_thread(work, *arguments)
        finally:
            self._num_reading_images -= 1

    def close(self) -> None:
        for texts in (self._small_texts, self._large_texts):
            texts.shutdown(wait=False, cancel_futures=True)
        self.tracing.close()

    async def in_text_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run text work (templates, tokenizing, long answers) beside the event loop, one after another."""
        texts = self._large_texts if body_bytes.get() > LARGE_BODY_BYTES else self._small_texts
        return await asyncio.get_running_loop().run_in_executor(texts, work, *arguments)

    def cut_prompt(
        self, prompt: str | dict[str, Any], limit: int | None, room: int, add_special_tokens: bool
    ) -> str | dict[str, Any]:
        """The last ``limit`` tokens of a prompt, or ``room`` of them for -1. Raises ApiError 400 for 0.

        To be called in the text thread.

        add_special_tokens: False encodes a text without what the tokenizer puts around texts.
        """
        if limit is None and add_special_tokens:
            return prompt
        if limit == 0:
            raise invalid("truncate_prompt_tokens", "is 0, but must be at least 1, or -1 for as many as fit.")
        fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if limit is not None and "multi_modal_data" in fields:
            raise unsupported("truncate_prompt_tokens", "would cut images: leave it out, or send text only.")
        token_ids = fields.get("prompt_token_ids")
        if token_ids is None:
            token_ids = self.engine.tokenizer.encode(fields["prompt"], add_special_tokens)
        most = room if limit == -1 else limit
        if most is None or len(token_ids) <= most:
            return {**fields, "prompt_token_ids": token_ids}
        return {"prompt_token_ids": token_ids[len(token_ids) - max(1, most) :]}

    async def run(
        self,
        num_completions: int,
        prepare: Callable[[], Sequence[PreparedRequest]],
        is_over: Callable[[], bool],
        *,
        has_images: bool = False,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Admit, prepare (in the text thread, or in one for images), run; (number of the request, its output)
        as outputs come.

        num_completions: places the request takes; more than those do not run beside one another. is_over:
        asked after every output of a single request, True if the model need not go on.
        Close the iterator to abort what still runs. Raises ApiError, RequestError or EngineDeadError.
        """
        limit = self.settings.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        with self.admission.enter(num_completions) as ticket:
            try:
                async with asyncio.timeout_at(deadline):
                    in_thread = self.in_image_thread if has_images else self.in_text_thread
                    prepared = await in_thread(prepare)
            except TimeoutError:
                raise timed_out(limit) from None
            ticket.add_prompt_tokens(sum(len(one.prompt_token_ids) * one.params.n for one in prepared))
            if self.admission.is_draining:
                raise shutting_down()
            ticket.request_ids = [one.request_id for one in prepared]
            async with aclosing(self._merged(prepared, num_completions, deadline, is_over)) as outputs:
                async for number, output in outputs:
                    if output.outputs and output.metrics.first_token_time is not None:
                        ticket.started()
                    yield number, output

    async def run_in_rounds(
        self,
        places: int,
        prepare: Callable[[], Sequence[PreparedRequest]],
        finish: Callable[[Sequence[RequestOutput]], None],
    ) -> None:
        """Run rounds of requests, each made of what the last one gave, until ``prepare`` has no more.

        prepare: makes a round in the text thread.
        finish: gets the last outputs of its requests, in their order. Raises as ``run``.
        """
        limit = self.settings.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        with self.admission.enter(places) as ticket:
            while prepared := await self.in_text_thread(prepare):
                if self.admission.is_draining:
                    raise shutting_down()
                ticket.request_ids = [one.request_id for one in prepared]
                last: dict[int, RequestOutput] = {}
                async with aclosing(self._merged(prepared, places, deadline, lambda: False)) as outputs:
                    async for number, output in outputs:
                        last[number] = output
                finish([last[number] for number in range(len(prepared))])

    async def run_in_turn(
        self,
        num_requests: int,
        prepare: Callable[[int], PreparedRequest],
        finish: Callable[[int, RequestOutput], None],
    ) -> None:
        """Run many requests of one client, of which few are in the engine at a time.

        They take half of its places at most, and together no more prompt tokens than one step has: a request
        that comes meanwhile waits for those, not for all. prepare: makes the request of a number, in the text
        thread, when its turn comes. finish: gets its last output. Raises as ``run``; the first failure ends
        all of them.
        """
        scheduler, limit = self.engine.config.scheduler, self.settings.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        places = min(num_requests, max(1, scheduler.max_num_seqs // 2))
        numbers, room = iter(range(num_requests)), _TokenRoom(scheduler.max_num_batched_tokens)

        async def work(ticket: Ticket) -> None:
            for number in numbers:
                prepared = await self.in_text_thread(prepare, number)
                num_tokens = len(prepared.prompt_token_ids)
                async with room.taken(num_tokens):
                    # Others may have filled the queue meanwhile.
                    # Work that has begun waits; other work is refused.
                    while number >= places and not self.admission.has_room(num_tokens):
                        await asyncio.sleep(QUEUE_POLL_SECONDS)
                    ticket.add_prompt_tokens(num_tokens)
                    ticket.request_ids.append(prepared.request_id)
                    async with aclosing(self._followed(prepared, deadline)) as outputs:
                        async for output in outputs:
                            if output.finished:
                                finish(number, output)
                    ticket.remove_prompt_tokens(num_tokens)
                    ticket.request_ids.remove(prepared.request_id)

        with self.admission.enter(places) as ticket:
            try:
                async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as group:
                    for _ in range(places):
                        group.create_task(work(ticket))
            except TimeoutError:
                raise timed_out(limit) from None
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _followed(
        self, request: PreparedRequest, deadline: float | None, is_over: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, counted and traced. Raises for one that the engine gave up on.

        deadline: by the event loop's clock; the engine ends what still runs then, also without a reader.
        """
        now = asyncio.get_running_loop().time
        recorder = RequestRecorder(self.metrics, request.params.n, request.arrival_time)
        left = None if deadline is None else max(0.0, deadline - now())
        with recorder.counting(), self.tracing.following(request, self.models.base_name) as trace:
            async with aclosing(self.engine.generate(request, deadline=left)) as outputs:
                async for output in outputs:
                    recorder.record(output)
                    trace(output)
                    if output.error is not None and deadline is not None and now() >= deadline:
                        raise timed_out(self.settings.request_timeout)
                    if output.error is not None:
                        raise RequestError(output.error)
                    if any(completion.finish_reason == FinishReason.ABORT for completion in output.outputs):
                        raise shutting_down()
                    yield output
                    if is_over():
                        return

    async def _merged(
        self,
        prepared: Sequence[PreparedRequest],
        places: int,
        deadline: float | None,
        is_over: Callable[[], bool],
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of several requests that run beside one another, at most ``places`` of them,
        as they come."""
        if len(prepared) == 1:
            async with aclosing(self._followed(prepared[0], deadline, is_over)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(
            maxsize=len(prepared)
        )
        free_places = asyncio.Semaphore(places)

        async def pump(number: int, request: PreparedRequest) -> None:
            try:
                async with free_places, aclosing(self._followed(request, deadline)) as outputs:
                    async for output in outputs:
                        await queue.put((number, output))
            except Exception as error:
                await queue.put((number, error))
            else:
                await queue.put((number, None))

        tasks = [asyncio.create_task(pump(number, request)) for number, request in enumerate(prepared)]
        try:
            num_running = len(tasks)
            while num_running:
                number, news = await queue.get()
                if isinstance(news, BaseException):
                    raise news
                if news is None:
                    num_running -= 1
                else:
                    yield number, news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh_stats(self) -> None:
        """Look at the counters of all engines; one that is down leaves its last ones standing."""
        self.metrics.num_admitted = self.admission.num_completions
        self.metrics.look_at_engines(await self.engine.engine_stats(), self.engine.num_restarts)

    async def abort_all(self) -> None:
        """End every running request early;
        their clients get an error that says the server is shutting down."""
        for ticket in list(self.admission.tickets):
            for request_id in ticket.request_ids:
                await self.engine.abort(request_id)


class _TokenRoom:
    """So many prompt tokens at a time; a prompt of more gets in when it is alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_taken = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, num_tokens: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._num_taken == 0 or self._num_taken + num_tokens <= self._size
            )
            self._num_taken += num_tokens
        try:
            yield
        finally:
            self._num_taken -= num_tokens
            async with self._changed:
                self._changed.notify_all()


def _chat_template(engine: AsyncLLM) -> str:
    """The text of the model's chat templates, empty without any."""
    if not engine.has_tokenizer:
        return ""
    template = engine.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
