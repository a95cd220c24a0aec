"""Many streams at once through the real server and engine process, with aborts, errors and preemptions:
what is left?

As a program: ``python -m tests.server.soak --requests 5000 --compiled [--model smollm2]`` reports counts and
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from minivllm.config import EngineArgs
from minivllm.frontend.async_llm import AsyncLLM
from tests.server.serving import Served, serve_in_thread

NUM_CASES = 24
CONCURRENCY = 32
PATIENCE = 3600.0
"""Seconds that a request may take, on a machine that is busy with other things."""
MAX_MEMORY_GROWTH = 0.02
"""Over the last half of a long run."""


def engine_args(model: str, compiled: bool = False, max_num_seqs: int = 8) -> EngineArgs:
    """A pool so small that requests preempt one another."""
    return EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=not compiled,
        compile_in_background=False,
        block_size=8,
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8 * max_num_seqs,
        num_gpu_blocks_override=5 * max_num_seqs,
    )


@dataclass(frozen=True)
class Case:
    """A request with a known answer."""

    prompt: list[int]
    max_tokens: int

    def body(self, **others: Any) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **others,
        }


@dataclass
class Findings:
    """What a soak saw. memory: bytes of server and engine together, sampled over the run."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    left_over: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_growth(self) -> float:
        """Of the last half of the run, relative."""
        half = self.memory[len(self.memory) // 2 :]
        part = max(1, len(half) // 4)
        return sum(half[-part:]) / sum(half[:part]) - 1


class Soak:
    """num_requests: besides the solo runs that give the expected texts."""

    def __init__(self, server: Served, num_requests: int, vocab_size: int, seed: int = 0) -> None:
        self._server = server
        self._num_requests = num_requests
        self._random = random.Random(seed)
        self._findings = Findings()
        self._process = psutil.Process()

        def tokens(count: int) -> list[int]:
            return [self._random.randrange(vocab_size) for _ in range(count)]

        shared = tokens(20)
        self._cases = [
            Case(
                shared * (number % 2) + tokens(self._random.randint(1, 50)),
                self._random.randint(1, 50),
            )
            for number in range(NUM_CASES)
        ]
        self._expected: dict[int, str] = {}

    async def run(self) -> Findings:
        await self._during_connections()
        # Connections of the client have been closed; what is open now was there before or has leaked.
        await asyncio.to_thread(self._server.wait_until, self._is_quiet)
        live = await self._get("/live")
        self._findings.num_preemptions = live["num_preemptions"]
        self._findings.left_over = {
            "running": live["num_running"],
            "waiting": live["num_waiting"],
            "KV usage": live["kv_cache_usage"],
            "streams": self._engine.num_unfinished_requests,
            "tickets": len(self._server.run.service.admission.tickets),
            "completions": self._server.run.service.admission.num_completions,
            "queued prompt tokens": self._server.run.service.admission.num_queued_prompt_tokens,
        }
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._engine.client.call("check_integrity"), self._server.loop)
        )
        return self._findings

    @property
    def _engine(self) -> AsyncLLM:
        engine = self._server.run.service.engine
        assert isinstance(engine, AsyncLLM)
        return engine

    def _is_quiet(self) -> bool:
        return (
            not self._engine.num_unfinished_requests and not self._server.run._server.server_state.connections
        )

    async def _get(self, path: str) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self._server.url) as client:
            answer: dict[str, Any] = (await client.get(path)).json()
            return answer

    async def _during_connections(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE, limits=limits) as client:
            for number, case in enumerate(self._cases):
                answer = await client.post("/v1/completions", json=case.body())
                self._expected[number] = answer.json()["choices"][0]["text"]
            kinds = [
                "stream",
                "stream",
                "stream",
                "whole",
                "pair",
                "leave",
                "leave",
                "leave at once",
                "refused",
            ]
            waiting = iter(
                [
                    (self._random.choice(kinds), self._random.randrange(NUM_CASES))
                    for _ in range(self._num_requests)
                ]
            )

            async def place(source: random.Random) -> None:
                for kind, number in waiting:
                    await self._one(client, kind, number, source)
                    self._findings.kinds[kind] += 1
                    if self._findings.kinds.total() % 25 == 0:
                        self._findings.memory.append(self._memory())

            await asyncio.gather(*(place(random.Random(number)) for number in range(CONCURRENCY)))

    def _memory(self) -> int:
        processes = [self._process, *self._process.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)

    async def _one(self, client: httpx.AsyncClient, kind: str, number: int, source: random.Random) -> None:
        case, expected = self._cases[number], self._expected[number]
        if kind == "refused":
            bodies = (case.body(max_tokens=10_000), case.body(nonsense=1), case.body(model="another"))
            answer = await client.post("/v1/completions", json=source.choice(bodies))
            if answer.status_code not in (400, 404):
                self._findings.wrong.append(f"{answer.status_code} for a bad request")
        elif kind in ("whole", "pair"):
            answer = await client.post("/v1/completions", json=case.body(n=2 if kind == "pair" else 1))
            if answer.status_code != 200:
                self._findings.wrong.append(
                    f"case {number}, {kind}: {answer.status_code} {answer.text[:300]}"
                )
                return
            texts = {choice["text"] for choice in answer.json()["choices"]}
            if texts != {expected}:
                self._findings.wrong.append(f"case {number}, {kind}: {texts} instead of {expected!r}")
        else:
            text, leaves_after = "", 0 if kind == "leave at once" else source.randint(1, 30)
            async with client.stream("POST", "/v1/completions", json=case.body(stream=True)) as response:
                if kind == "leave at once":
                    return
                num_chunks = 0
                async for piece in _texts(response):
                    text += piece
                    num_chunks += 1
                    if kind == "leave" and num_chunks >= leaves_after:
                        break
                else:
                    if text != expected:
                        self._findings.wrong.append(
                            f"case {number}, stream: {text!r} instead of {expected!r}"
                        )
            if not expected.startswith(text):
                self._findings.wrong.append(f"case {number}, {kind}: {text!r} does not begin {expected!r}")


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event["choices"][0]["text"]


def soak(args: EngineArgs, num_requests: int, vocab_size: int) -> Findings:
    """A server of its own, the soak, and what is open afterwards compared with before."""
    with serve_in_thread(
        lambda: AsyncLLM.from_args(args), max_queued_requests=256, request_timeout=PATIENCE
    ) as server:
        asyncio.run(Soak(server, 40, vocab_size).run())  # whatever is opened once is open from here on
        before = _open_things(server)
        findings = asyncio.run(Soak(server, num_requests, vocab_size, seed=1).run())
        findings.left_over |= {name: count - before[name] for name, count in _open_things(server).items()}
    return findings


def _open_things(server: Served) -> dict[str, int]:
    gc.collect()
    core = psutil.Process().children(recursive=True)
    return {
        "file descriptors": psutil.Process().num_fds(),
        "file descriptors of the engine": sum(process.num_fds() for process in core),
        "tasks": len(asyncio.all_tasks(server.loop)),
        "threads": psutil.Process().num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--compiled", action="store_true", help="several times faster with a real model")
    parser.add_argument(
        "--max-num-seqs", type=int, default=24, help="more run faster; the pool grows with them"
    )
    options = parser.parse_args()
    model = str(Path(options.model).resolve()) if Path(options.model).exists() else options.model
    args = engine_args(model, options.compiled, options.max_num_seqs)
    findings = soak(args, options.requests, options.vocab_size)
    print(dict(findings.kinds), f"{findings.num_preemptions} preemptions")
    print(f"memory {findings.memory[0] / 2**20:.0f} to {findings.memory[-1] / 2**20:.0f} MiB, "
          f"{findings.memory_growth:+.2%} over the last half")  # fmt: skip
    print("left over:", findings.left_over)
    print(*findings.wrong[:10], sep="\n")
    failed = findings.wrong or any(findings.left_over.values()) or findings.memory_growth > MAX_MEMORY_GROWTH
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
