"""Requests to an OpenAI-compatible server, each followed chunk by chunk, without a client library in between."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from minivllm.bench.sides.drive import Record, Task
from minivllm.cli.engine.openai_server import error_message, key_header, stream_events

if TYPE_CHECKING:
    import httpx

Endpoint = Literal["completions", "chat"]
_WORDS = ("one", "day", "the", "old", "sea", "was", "calm", "and", "a", "red", "boat", "went", "far", "out", "to", "it")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is measured. url: where its /v1 is. model: the name it answers to; None leaves it to the server.

    ignore_eos: ask for the full length with a parameter that not every server has.
    """

    url: str
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    timeout: float = 600.0

    def path(self) -> str:
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    def body(self, task: Task) -> dict[str, Any]:
        """A greedy, streamed request for ``task``. A chat takes no token ids: it gets a word for each."""
        body: dict[str, Any] = {
            "max_tokens": task.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            body["prompt"] = task.prompt
        else:
            text = " ".join(_WORDS[token % len(_WORDS)] for token in task.prompt)
            body["messages"] = [{"role": "user", "content": text}]
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass
class ServedRecord(Record):
    """What became of a request to a server, which tells how many tokens there were, but not which.

    num_chunks: pieces of text that arrived. cancelled: the client left on purpose. refused_after: how long it took
    to be told 429, from when the request was due [seconds].
    """

    num_prompt_tokens: int = 0
    num_chunks: int = 0
    cancelled: bool = False
    refused_after: float | None = None


def token_times(chunk_times: Sequence[float], num_tokens: int) -> list[float]:
    """When each token came, the first with the first chunk and the last with the last one, the others evenly between.

    A chunk may carry several tokens, and a token may come without text: only their number is known for sure.
    """
    if not chunk_times or num_tokens < 1:
        return []
    last = len(chunk_times) - 1
    if num_tokens == 1:
        return [chunk_times[0]]
    return [chunk_times[round(number * last / (num_tokens - 1))] for number in range(num_tokens)]


class LoadGenerator:
    """Sends tasks and writes down what came back.

    concurrency: closed loop, the next request is due when one of so many places is free. None: open loop, a request is
    due at its arrival, however busy the server is. cancel_rate: share of requests whose client leaves at a random
    place of the answer. Needs httpx.
    """

    def __init__(
        self,
        target: Target,
        *,
        concurrency: int | None = None,
        cancel_rate: float = 0.0,
        seed: int = 0,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._concurrency = concurrency
        self._cancel_rate = cancel_rate
        self._seed = seed
        self._on_end = on_end

    async def run(self, tasks: Sequence[Task]) -> tuple[list[ServedRecord], float]:
        """All records, and the time from the start to the last end [seconds]."""
        import httpx

        records = [ServedRecord() for _ in tasks]
        ended = [asyncio.Event() for _ in tasks]
        source = random.Random(f"cancel/{self._seed}")
        leave_after = [
            source.randrange(max(1, task.max_tokens)) if source.random() < self._cancel_rate else None for task in tasks
        ]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=self._target.url,
            headers=key_header(self._target.api_key),
            timeout=self._target.timeout,
            limits=limits,
            trust_env=False,
        ) as client:
            start = time.perf_counter()

            async def one(index: int) -> None:
                task = tasks[index]
                due = 0.0
                if task.after is not None:
                    await ended[task.after].wait()
                    due = time.perf_counter() - start
                if self._concurrency is None or task.after is not None:
                    due += task.arrival
                    await asyncio.sleep(due - (time.perf_counter() - start))
                else:
                    due = time.perf_counter() - start
                records[index].arrival = due
                await self._send(client, task, records[index], start, leave_after[index])
                ended[index].set()
                self._on_end()

            if self._concurrency is None:
                await asyncio.gather(*(one(index) for index in range(len(tasks))))
            else:
                waiting = iter(range(len(tasks)))

                async def place() -> None:
                    for index in waiting:
                        await one(index)

                await asyncio.gather(*(place() for _ in range(self._concurrency)))
            return records, time.perf_counter() - start

    async def _send(
        self, client: httpx.AsyncClient, task: Task, record: ServedRecord, start: float, leave_after: int | None
    ) -> None:
        """One request. Whatever goes wrong is written into its record, by class."""
        import httpx

        chunk_times: list[float] = []
        usage: dict[str, Any] | None = None
        try:
            async with client.stream("POST", self._target.path(), json=self._target.body(task)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    if response.status_code == 429:
                        record.refused_after = time.perf_counter() - start - record.arrival
                    record.error = f"HTTP {response.status_code}: {error_message(text)}"
                    return
                if leave_after == 0:
                    record.cancelled = True
                    return
                async with aclosing(stream_events(response)) as events:
                    async for event in events:
                        if event.get("error"):
                            record.error = f"stream error: {error_message(json.dumps(event))}"
                            return
                        usage = event.get("usage") or usage
                        if any(_has_text(choice) for choice in event.get("choices") or ()):
                            chunk_times.append(time.perf_counter() - start)
                            if leave_after is not None and len(chunk_times) >= leave_after:
                                record.cancelled = True
                                return
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
            return
        except (ValueError, AttributeError, TypeError) as error:
            record.error = f"broken stream: {type(error).__name__}: {error}"
            return
        if usage is None:
            record.error = "no usage: the stream ended without counting its tokens, and chunks are not tokens."
            return
        record.num_chunks = len(chunk_times)
        record.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        # Tokens of an answer without any text came when it ended.
        chunk_times = chunk_times or [time.perf_counter() - start]
        record.times = token_times(chunk_times, int(usage.get("completion_tokens") or 0))


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))
