"""What all endpoints share: the engine, who gets in, the thread for text work, running prepared requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from minivllm.errors import EngineDeadError, RequestError
from minivllm.frontend.detokenizer import TokenDecoder
from minivllm.frontend.input_processor import PreparedRequest
from minivllm.frontend.outputs import RequestOutput
from minivllm.messages import FinishReason
from minivllm.metrics.prometheus import ServerMetrics
from minivllm.server.admission import Admission, Ticket
from minivllm.server.engine import AsyncEngine
from minivllm.server.errors import internal_error, shutting_down, timed_out
from minivllm.server.models import ServedModels
from minivllm.server.parsers.choose import choose_answer_format
from minivllm.server.settings import ServerSettings
from minivllm.server.tracing import make_tracing

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Service:
    """One engine and the names it is served under. Raises ConfigError for a parser there is none of."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.max_model_len = engine.config.scheduler.max_model_len
        names = settings.served_model_names or (engine.config.model,)
        self.models = ServedModels(engine, names, settings.lora_adapters, settings.lora_directory)
        self.started_at = int(time.time())
        self.metrics = ServerMetrics()
        self.tracing = make_tracing(settings.otlp_endpoint)
        self.admission = Admission(
            engine.config.scheduler.max_num_seqs, settings.max_queued_requests, settings.max_queued_prompt_tokens
        )
        self.chat_template = _chat_template(engine)
        self.answer_format = choose_answer_format(
            self.chat_template, settings.tool_call_parser, settings.reasoning_parser
        )
        self.token_decoder = TokenDecoder(engine.tokenizer.backend) if engine.has_tokenizer else None
        # One thread: tokenizing a long prompt must not stop the event loop, and the input processor is not shared.
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minivllm-text")

    def close(self) -> None:
        self._text_thread.shutdown(wait=False, cancel_futures=True)
        self.tracing.close()

    async def in_text_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run text work (templates, tokenizing) beside the event loop, one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work, *arguments)

    async def run(
        self, num_completions: int, prepare: Callable[[], Sequence[PreparedRequest]]
    ) -> AsyncGenerator[tuple[PreparedRequest, int, RequestOutput], None]:
        """Admit, prepare (in the text thread), run; (request, its number, output) as outputs come.

        num_completions: places the request takes; more than those do not run beside one another.
        Close the iterator to abort what still runs. Raises ApiError, RequestError or EngineDeadError.
        """
        limit = self.settings.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        with self.admission.enter(num_completions) as ticket:
            prepared = await self.in_text_thread(prepare)
            ticket.add_prompt_tokens(sum(len(one.prompt_token_ids) * one.params.n for one in prepared))
            if self.admission.is_draining:
                raise shutting_down()
            ticket.request_ids = [one.request_id for one in prepared]
            recorders = [self.metrics.recorder() for _ in prepared]
            async with aclosing(self._merged(prepared, num_completions)) as outputs:
                with self.tracing.following(prepared, self.models.base_name) as trace:
                    while True:
                        try:
                            async with asyncio.timeout_at(deadline):
                                number, output = await anext(outputs)
                        except StopAsyncIteration:
                            return
                        except TimeoutError:
                            raise timed_out(limit) from None
                        if output.outputs and output.metrics.first_token_time is not None:
                            ticket.started()
                        recorders[number].record(output)
                        trace(number, output)
                        self._check(output, ticket)
                        yield prepared[number], number, output

    def _check(self, output: RequestOutput, ticket: Ticket) -> None:
        """Raise for a request that the engine gave up on."""
        if output.error is not None:
            if output.metrics.num_generation_tokens == 0:
                raise RequestError(output.error)
            logger.error("Request %s failed after its first token: %s", output.request_id, output.error)
            raise internal_error()
        if any(completion.finish_reason == FinishReason.ABORT for completion in output.outputs):
            raise shutting_down()

    async def _merged(
        self, prepared: Sequence[PreparedRequest], places: int
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of several requests that run beside one another, at most ``places`` of them, as they come."""
        if len(prepared) == 1:
            async with aclosing(self.engine.generate(prepared[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(prepared))
        free_places = asyncio.Semaphore(places)

        async def pump(number: int, request: PreparedRequest) -> None:
            try:
                async with free_places, aclosing(self.engine.generate(request)) as outputs:
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
        """Look at the core's counters; a dead engine leaves the last ones standing."""
        self.metrics.num_admitted = self.admission.num_completions
        try:
            self.metrics.engine_stats = await self.engine.stats()
        except EngineDeadError:
            self.metrics.engine_is_up = False

    async def abort_all(self) -> None:
        """End every running request early; their clients get an error that says the server is shutting down."""
        for ticket in list(self.admission.tickets):
            for request_id in ticket.request_ids:
                await self.engine.abort(request_id)


def new_id(prefix: str) -> str:
    """A name for an answer, unguessable and never a client's own."""
    return f"{prefix}-{secrets.token_hex(16)}"


def _chat_template(engine: AsyncEngine) -> str:
    """The text of the model's chat templates, empty without any."""
    if not engine.has_tokenizer:
        return ""
    template = engine.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
