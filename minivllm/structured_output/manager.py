"""Structured output in the engine core: grammars are compiled and masks computed on threads beside the loop.

The scheduler knows nothing of it:
it keeps BLOCKED requests waiting, and asks every request's own stop conditions.
"""

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from minivllm.config import EngineConfig
from minivllm.errors import MinivllmError
from minivllm.messages import SchedulerOutput, TokenMasks
from minivllm.request import Request, RequestStatus, TokenMaskSource
from minivllm.sampling_params import StructuredOutputs
from minivllm.structured_output.compiler import GrammarCompiler
from minivllm.structured_output.grammar import ALL_TOKENS, Grammar, ThinkingBudget

FIXED_BYTES = 64 * 1024
BYTES_PER_SOURCE_BYTE = 16
"""Measured over schemas of 2 to 90 kB: a compiled one takes up to 15 times its text."""


class GrammarCache:
    """A grammar at its start, or the sentence that says why there is none: refusing again then costs nothing.

    Least recently used entries go first. Sizes are estimates by the length of the source [bytes]."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[Grammar | str, int]] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0

    def get(self, structured: StructuredOutputs) -> Grammar | str | None:
        entry = self._entries.get(structured.key)
        if entry is None:
            return None
        self._entries.move_to_end(structured.key)
        self.num_hits += 1
        return entry[0]

    def put(self, structured: StructuredOutputs, compiled: Grammar | str) -> None:
        """Replaces an entry of the same key; one that is larger than the whole cache is not kept."""
        replaced = self._entries.pop(structured.key, None)
        self.num_bytes -= 0 if replaced is None else replaced[1]
        size = FIXED_BYTES + BYTES_PER_SOURCE_BYTE * len(structured.source.encode())
        self._entries[structured.key] = (compiled, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)


logger = logging.getLogger(__name__)

COMPILE_SECONDS = 30.0
"""A request whose grammar takes longer is given up; reading the vocabulary, once, counts as well."""
CACHE_BYTES = 64 * 2**20
POLL_SECONDS = 0.01
STACK_BYTES = 256 * 2**20
"""Address space for the stack of threads that run grammars:
compiling recurses as deep as rules refer to rules."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BlockedRequest:
    request: Request
    structured: StructuredOutputs
    deadline: float


class StructuredOutputManager:
    """Used by the thread that drives the engine core;
    its own threads start with the first structured request."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        *,
        cache_bytes: int = CACHE_BYTES,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        """vocab_size: width of the logits. seconds: how long a grammar may take to compile."""
        self.cache = GrammarCache(cache_bytes)
        self._compiler = GrammarCompiler(config, vocab_size)
        self._words = -(-vocab_size // 32)
        self._seconds = seconds
        self.blocked: list[BlockedRequest] = []
        """Requests that wait for their grammars."""
        self.guided: dict[str, Request] = {}
        """Requests with token masks, by id, until the first step after they have finished."""
        self._compiling: dict[Hashable, tuple[StructuredOutputs, Future[Grammar]]] = {}
        self._compile_pool = ThreadPoolExecutor(
            min(4, os.cpu_count() or 1), thread_name_prefix="grammar-compiler"
        )
        self._mask_pool = ThreadPoolExecutor(1, thread_name_prefix="token-masks")

    def prepare(self, request: Request) -> None:
        """Give a new request what guides it, or block it until its grammar is compiled."""
        params, sent = request.sampling_params, request.engine_request
        if params.thinking_budget is not None and sent.thinking_token_ids is not None:
            self._attach(
                request,
                ThinkingBudget(params.thinking_budget, *sent.thinking_token_ids, sent.prompt_token_ids),
            )
        structured = params.structured_outputs
        if structured is None or request.is_finished:
            return
        compiled = self.cache.get(structured)
        if compiled is not None and not isinstance(compiled, str):
            self._attach(request, compiled.copy())
            return
        request.status = RequestStatus.BLOCKED
        self.blocked.append(BlockedRequest(request, structured, time.monotonic() + self._seconds))
        if compiled is None and structured.key not in self._compiling:
            compiling = _submit(self._compile_pool, lambda: self._compile(structured, sent.eos_token_ids))
            self._compiling[structured.key] = structured, compiling

    def poll(self, may_wait: bool) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not be blocked any longer,
        each with None or with the reason why it has to be refused.

        may_wait: there is nothing else to do, so wait a moment for the first one.
        """
        if may_wait and self._compiling:
            futures = [future for _, future in self._compiling.values()]
            wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        outcomes: dict[Hashable, Grammar | str] = {}
        for key, (structured, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[key]
                outcomes[key] = _outcome(future)
                self.cache.put(structured, outcomes[key])
        now = time.monotonic()
        still_blocked = []
        for blocked in self.blocked:
            request = blocked.request
            if request.is_finished:
                continue
            compiled = outcomes.get(blocked.structured.key) or self.cache.get(blocked.structured)
            if compiled is None and now < blocked.deadline:
                still_blocked.append(blocked)
            elif compiled is None:
                yield (
                    request,
                    f"The structured output could not be compiled within {self._seconds:g} s: simplify it.",
                )
            elif isinstance(compiled, str):
                yield request, compiled
            else:
                self._attach(request, compiled.copy())
                yield request, None
        self.blocked = still_blocked
        wanted = {blocked.structured.key for blocked in still_blocked}
        for key in self._compiling.keys() - wanted:
            if self._compiling[key][1].cancel():  # no request waits for it any longer, and it has not begun
                del self._compiling[key]

    def start_masks(self, step: SchedulerOutput) -> Callable[[], TokenMasks] | None:
        """Begin to compute the masks of a step that was just scheduled; the result waits for them.
        None: none needed.

        A mask is for requests that will sample: all their known tokens are computed by the end of the step.
        """
        self.guided = {name: request for name, request in self.guided.items() if not request.is_finished}
        jobs: list[tuple[TokenMaskSource, list[int]]] = []
        first_rows: dict[str, int] = {}
        num_rows = 0
        for request_id, request in self.guided.items():
            is_scheduled = request_id in step.num_scheduled_tokens
            if is_scheduled and request.num_computed_tokens >= request.num_tokens:
                assert request.token_mask is not None
                drafts = step.draft_token_ids.get(request_id, [])
                first_rows[request_id] = num_rows
                jobs.append((request.token_mask, drafts))
                num_rows += 1 + len(drafts)
        if not jobs:
            return None

        def compute() -> TokenMasks:
            rows = np.full((num_rows, self._words), ALL_TOKENS, dtype="<i4")
            for (source, drafts), row in zip(jobs, first_rows.values()):
                source.fill(rows[row : row + 1 + len(drafts)], drafts)
            return TokenMasks(first_rows=first_rows, bits=rows.tobytes(), words=self._words)

        return _submit(self._mask_pool, compute).result

    def jump_ahead(self) -> dict[str, list[int]]:
        """Drafts for the running requests whose next tokens are bound to come: one step verifies them all.

        Not for those with a token in flight:
        what follows it is not known, and its mask may be being computed just now.
        """
        forced = {
            request_id: request.token_mask.forced_tokens()
            for request_id, request in self.guided.items()
            if request.status is RequestStatus.RUNNING
            and request.token_mask is not None
            and not request.num_output_placeholders
        }
        return {request_id: token_ids for request_id, token_ids in forced.items() if token_ids}

    def _compile(self, structured: StructuredOutputs, eos_token_ids: list[int]) -> Grammar:
        # Seconds of work, once, that every structured request waits for: beside a busy engine a thread that
        # has stepped back would not be through before their deadline.
        self._compiler.read_vocabulary(eos_token_ids)
        _step_back()
        return self._compiler.compile(structured, eos_token_ids)

    def _attach(self, request: Request, guide: Grammar | ThinkingBudget) -> None:
        request.token_mask = guide
        request.stop_conditions.append(guide)
        self.guided[request.request_id] = request

    def shutdown(self) -> None:
        for pool in (self._compile_pool, self._mask_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _step_back() -> None:
    """Give the calling thread a low priority: it gets the processor time that other threads leave."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def _outcome(future: Future[Grammar]) -> Grammar | str:
    try:
        return future.result()
    except MinivllmError as error:
        return str(error)
    except BaseException as error:  # a foreign library; its panics are no Exceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        logger.error("A grammar could not be compiled.", exc_info=error)
        return (
            "The structured output cannot be compiled: the compiler failed on it. Simplify the schema or "
            "grammar."
        )


def _submit(pool: ThreadPoolExecutor, job: Callable[[], Result]) -> Future[Result]:
    """Run a job; should the pool start a thread for it, that thread gets a deep stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        return pool.submit(job)
    finally:
        threading.stack_size(before)
