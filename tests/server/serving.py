"""A server to test with: the real one in a thread of this process,
in front of AsyncLLM with a scripted engine core."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from minivllm import LoRARequest
from minivllm.config import SchedulerConfig
from minivllm.errors import EngineDeadError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.kv_cache.specs import one_group
from minivllm.messages import (
    EngineEvent,
    EngineOutput,
    EngineRequest,
    EventType,
    FinishReason,
    KVTransferStats,
    PositionLogprobs,
    PrefixTree,
    RecentStep,
    SchedulerStats,
)
from minivllm.server.run import ServerRun, listen
from minivllm.server.service.settings import ServerSettings
from minivllm.simulation.executor import simulated_config
from minivllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

EOS = 1
VOCAB_SIZE = 384
Script = Callable[[EngineRequest], list[int] | str]
"""The tokens of a request, or why the engine refuses it."""


class ScriptedCore:
    """Plays the engine process below AsyncLLM: every running request gets one token per step, or a vector.

    max_running: requests that run at a time; the others wait. step_seconds: pause between steps. held: while
    set, no step is made. silent: while set, no question about it is answered.
    ``admitted`` counts every request that ever reached it, ``num_running`` those it works on.
    """

    model_vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    num_engines, num_up, num_restarts = 1, 1, (0,)
    kv_groups = (one_group(1, 16, num_blocks=100),)

    def __init__(self, script: Script, *, max_model_len: int = 4096, max_num_seqs: int = 8) -> None:
        scheduler = SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, policy="priority", has_priorities=True
        )
        self.config = simulated_config(scheduler, model="scripted")
        self.script = script
        self.step_seconds = 0.0
        self.held = self.silent = False
        self.tiers: list[KVTransferStats] = []
        self.tree = PrefixTree(nodes=[], num_blocks_left_out=0)
        self.asked_nodes: list[int] = []
        self.admitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.running: dict[str, EngineRequest] = {}
        self.dead_error: EngineDeadError | None = None
        self._given: dict[str, int] = {}
        self._num_steps = 0
        self._recent_steps: deque[RecentStep] = deque(maxlen=50)
        self._task: asyncio.Task[None] | None = None
        self._on_death: Callable[[EngineDeadError], None] = lambda error: None

    def start(
        self,
        on_outputs: Callable[[list[EngineOutput]], Awaitable[None]],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._on_death = on_death
        self._task = asyncio.get_running_loop().create_task(self._loop(on_outputs))

    def add_request(self, request: EngineRequest) -> None:
        self.admitted.append(request)
        self.running[request.request_id] = request
        self._given[request.request_id] = 0

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    async def call(self, method: str, *args: Any) -> Any:
        if self.dead_error is not None:
            raise self.dead_error
        if method == "recent_steps":
            return [msgspec.to_builtins(step) for step in self._recent_steps if step.step > args[0]]
        if method == "prefix_tree":
            self.asked_nodes.append(args[0])
            return msgspec.to_builtins(self.tree)
        assert method == "stats"
        limit = self.config.scheduler.max_num_seqs
        num_running = min(limit, len(self.running))
        return msgspec.to_builtins(
            SchedulerStats(
                num_running=num_running,
                num_waiting=len(self.running) - num_running,
                kv_cache_usage=0.25,
                prefix_cache_queried_tokens=10,
                prefix_cache_hit_tokens=4,
                prefix_cache_copied_tokens=1,
                num_preemptions=2,
                num_steps=self._num_steps,
                kv_transfer=self.tiers,
            )
        )

    async def call_engine(self, index: int, method: str, *args: Any) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        return await self.call(method, *args)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def die(self, cause: str = "the core met its end") -> None:
        self.dead_error = EngineDeadError(cause)
        if self._task is not None:
            self._task.cancel()
        self._on_death(self.dead_error)

    async def _loop(self, on_outputs: Callable[[list[EngineOutput]], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self.step_seconds if self.running and not self.held else 0.001)
            if self.held:
                continue
            requests = list(self.running.values())[: self.config.scheduler.max_num_seqs]
            if not requests:
                continue
            self._num_steps += 1
            self._recent_steps.append(
                RecentStep(
                    step=self._num_steps,
                    num_scheduled_tokens={
                        one.request_id: 1 if self._given[one.request_id] else len(one.prompt_token_ids)
                        for one in requests
                    },
                    unfinished_prompts=set(),
                    preempted=[],
                )
            )
            outputs = [self._advance(request) for request in requests]
            for output in outputs:
                if output.finish_reason is not None:
                    self.running.pop(output.request_id, None)
            await on_outputs(outputs)

    def _advance(self, request: EngineRequest) -> EngineOutput:
        script, given = self.script(request), self._given[request.request_id]
        output = EngineOutput(request_id=request.request_id, num_cached_tokens=1)
        if given == 0:
            now = time.monotonic()
            output.events = [EngineEvent(EventType.QUEUED, now), EngineEvent(EventType.SCHEDULED, now)]
        if isinstance(script, str):
            output.finish_reason, output.error = FinishReason.ERROR, script
            return output
        params = request.sampling_params
        if given == 0 and params.prompt_logprobs is not None:
            output.prompt_logprobs = [
                _logprobs(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:]
            ]
        if request.pooling is not None:
            output.finish_reason, output.pooled = (
                FinishReason.STOP,
                [float(len(request.prompt_token_ids)), 0.0],
            )
            return output
        token = script[given] if given < len(script) else EOS
        output.new_token_ids = [token]
        if params.logprobs is not None:
            output.logprobs = [_logprobs(token, params.logprobs)]
        self._given[request.request_id] = given = given + 1
        if token == EOS and not params.ignore_eos:
            output.finish_reason = FinishReason.STOP
        elif given >= request.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output


def _logprobs(token: int, num_alternatives: int) -> PositionLogprobs:
    """The token itself is the second likeliest; the likeliest ones follow, as the engine reports them."""
    likeliest = [(token + 7) % VOCAB_SIZE, token, *((token + 8 + place) % VOCAB_SIZE for place in range(98))]
    alternatives = likeliest[:num_alternatives]
    values = [-0.5 if place == 0 else -1.0 - place for place in range(num_alternatives)]
    return PositionLogprobs([token, *alternatives], [-2.0, *values], 2)


class Served:
    """A running server. Calls into its event loop go through ``call``."""

    def __init__(self, run: ServerRun, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.run, self.loop, self.port = run, loop, port
        self.url = f"http://127.0.0.1:{port}"

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait for something that must come true; fails if it does not."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "this never came true"
            time.sleep(0.005)


class ServedCore(Served):
    """A running server with a scripted core below it."""

    core: ScriptedCore


@dataclass
class RealServer:
    """A server in front of a real engine process.
    adapters: the first is served, the others lie in ``directory``."""

    served: Served
    model: Path
    directory: Path
    adapters: list[LoRARequest]

    @property
    def url(self) -> str:
        return self.served.url


@contextmanager
def serve_in_thread(make_engine: Callable[[], AsyncLLM], **settings: Any) -> Iterator[ServedCore]:
    """Run a server in a thread for the length of the block."""
    options = ServerSettings(**{"port": 0, "stats_interval": 0.0, "request_timeout": 60.0, **settings})
    listener = listen(options)
    started = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        engine = make_engine()
        run = ServerRun(engine, options, handle_signals=False)
        box["run"], box["loop"] = run, asyncio.get_running_loop()
        started.set()
        try:
            box["code"] = await run.run(listener)
        finally:
            await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    while not started.wait(0.05):
        assert thread.is_alive(), "the server did not start"
    server = ServedCore(box["run"], box["loop"], listener.getsockname()[1])
    try:
        server.wait_until(lambda: server.run.has_started)
        yield server
    finally:
        server.call(server.run.exit_now)
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def served(core: ScriptedCore, tokenizer: Tokenizer | None, **settings: Any) -> Iterator[ServedCore]:
    """A server in front of a scripted core."""
    with serve_in_thread(lambda: AsyncLLM(core, tokenizer), **settings) as server:  # type: ignore[arg-type]
        server.core = core
        yield server


class Scripts:
    """Answers by prompt: the text after the last ``say:`` in the prompt's text is what the model says,
    then it ends."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = load_tokenizer(directory)

    def __call__(self, request: EngineRequest) -> list[int] | str:
        text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        wish = text.rpartition("say:")[2].partition("<|im_end|>")[0]
        if wish.startswith("REFUSE"):
            return "The prompt needs more blocks than the cache has."
        return [*self.tokenizer.encode(wish, add_special_tokens=False), EOS]
