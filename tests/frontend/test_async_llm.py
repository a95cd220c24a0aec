"""AsyncLLM over a mock engine process:
streams, slow readers, readers that leave, deadlines, the engine's death."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.config import EngineArgs
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.messages import SchedulerStats
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import OutputKind, SamplingParams
from tests.frontend.small_tokenizers import byte_level_bpe, wrapped
from tests.mock_engine import COMMAND, HANG, RAISE, expected_tokens

TOKENIZER = wrapped(byte_level_bpe())


@asynccontextmanager
async def running(model: str = "mock", tokenizer: Any = None, **arguments: Any) -> AsyncIterator[AsyncLLM]:
    connection = EngineConnection(EngineArgs(model=model, **arguments), COMMAND)
    async with AsyncLLM(AsyncProcessClient(connection), tokenizer) as llm:
        yield llm


def ids(*token_ids: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids)}


def params(max_tokens: int = 8, kind: OutputKind = OutputKind.DELTA, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=kind, **more)


async def collect(stream: AsyncIterator[RequestOutput]) -> tuple[list[int], RequestOutput]:
    """Token ids of a delta stream, and its last output."""
    token_ids: list[int] = []
    async for output in stream:
        token_ids += [token for completion in output.outputs for token in completion.token_ids]
    return token_ids, output


async def idle(llm: AsyncLLM) -> SchedulerStats:
    """The engine's state when nothing is left in it; the test times out if something is."""
    while (stats := await llm.stats()).num_running + stats.num_waiting:
        pass
    assert stats.kv_cache_usage == 0.0 and llm.num_unfinished_requests == 0
    await llm.client.call("check_integrity")
    return stats


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


# Streams


def test_many_streams_share_the_engine_and_each_gets_its_own_tokens() -> None:
    async def test() -> None:
        async with running() as llm:
            results = await asyncio.gather(
                *(collect(llm.generate(ids(n, n), params(20))) for n in range(2, 80))
            )
            for n, (token_ids, last) in enumerate(results, start=2):
                assert token_ids == expected_tokens([n, n], 20)
                assert last.finished and last.outputs[0].finish_reason == "length"
            await idle(llm)

    run(test)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_slow_reader_loses_nothing_and_gathers_one_output(kind: OutputKind) -> None:
    """All that the engine did between two reads is one output: not one per step."""

    async def test() -> None:
        async with running() as llm:
            stream = llm.generate(ids(5), params(200, kind))
            first = await anext(stream)
            while llm.num_unfinished_requests:
                await asyncio.sleep(0.01)
            rest = [output async for output in stream]
            assert len(rest) == (0 if kind is OutputKind.FINAL_ONLY else 1)
            outputs = [first, *rest]
            token_ids = outputs[-1].outputs[0].token_ids
            if kind is OutputKind.DELTA:
                token_ids = [token for output in outputs for token in output.outputs[0].token_ids]
            assert token_ids == expected_tokens([5], 200)
            assert outputs[-1].finished and outputs[-1].metrics.num_generation_tokens == 200

    run(test)


def test_reader_that_stalls_holds_up_nobody() -> None:
    async def test() -> None:
        async with running() as llm:
            stalled = [llm.generate(ids(n), params(200)) for n in range(2, 10)]
            for stream in stalled:
                await anext(stream)
            assert (await collect(llm.generate(ids(50), params(200))))[0] == expected_tokens([50], 200)
            for stream in stalled:
                await stream.aclose()
            await idle(llm)

    run(test)


def test_text_and_stop_strings_and_several_completions() -> None:
    async def test() -> None:
        async with running(tokenizer=TOKENIZER) as llm:
            assert llm.has_tokenizer and llm.tokenizer is TOKENIZER
            prompt = TOKENIZER.encode("the fox")
            text = TOKENIZER.decode(expected_tokens(prompt, 30))
            stop = text[8:11]
            _, last = await collect(
                llm.generate("the fox", params(30, OutputKind.CUMULATIVE, stop=[stop], n=3), "mine")
            )
            assert last.request_id == "mine"
            for completion in last.outputs:
                assert completion.text == text[: text.index(stop)]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            await idle(llm)

    run(test)


def test_long_text_is_tokenized_beside_the_event_loop() -> None:
    async def test() -> None:
        async with running(tokenizer=TOKENIZER) as llm:
            with pytest.raises(RequestError, match="max_model_len is 256"):
                await collect(llm.generate("fox " * 5000))

    run(test)


def test_requests_that_cannot_be_served_are_refused_and_leave_nothing() -> None:
    async def test() -> None:
        async with running() as llm:
            for prompt in ("text", ids(1000), {"prompt_token_ids": []}, 7):
                with pytest.raises(RequestError):
                    await collect(llm.generate(prompt, params()))  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="priority"):
                await collect(llm.generate(ids(5), params(), priority=3))
            prepared = llm.prepare("twice", ids(5), params(50))
            stream = llm.generate(prepared)
            await anext(stream)
            with pytest.raises(RequestError, match="'twice' is being generated already"):
                await collect(llm.generate(prepared))
            await stream.aclose()
            await idle(llm)

    run(test)


def test_cache_salt_separates_tenants() -> None:
    async def test() -> None:
        async with running() as llm:
            long = ids(*range(2, 102))
            hits = []
            for salt in ("a", "b", "a", None, None):
                _, last = await collect(llm.generate(long, params(), cache_salt=salt))
                hits.append(last.num_cached_tokens)
            assert hits == [0, 0, 96, 0, 96]

    run(test)


# Ends


async def leave_by_closing(stream: AsyncGenerator[RequestOutput, None]) -> None:
    await anext(stream)
    await stream.aclose()


async def leave_by_cancelling(stream: AsyncGenerator[RequestOutput, None]) -> None:
    task = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_breaking(stream: AsyncGenerator[RequestOutput, None]) -> None:
    async for _ in stream:
        break


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling, leave_by_breaking])
def test_reader_that_leaves_frees_its_blocks_within_one_step(
    leave: Callable[[AsyncGenerator[RequestOutput, None]], Awaitable[None]],
) -> None:
    async def test() -> None:
        async with running("mock:0.02") as llm:
            await leave(llm.generate(ids(5), params(200, n=3)))
            await asyncio.sleep(0)  # an iterator that was not closed is closed by the event loop
            before = await llm.stats()
            after = await llm.stats()
            assert (after.num_running, after.kv_cache_usage) == (0, 0.0)
            assert after.num_steps - before.num_steps <= 1
            await idle(llm)

    run(test)


def test_abort_ends_the_stream_with_what_there_is() -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            stream = llm.generate(ids(5), params(200, OutputKind.CUMULATIVE), "a")
            await anext(stream)
            await llm.abort("a")
            await llm.abort("a")
            await llm.abort("never heard of")
            last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason == "abort" and last.finished
            count = len(last.outputs[0].token_ids)
            assert 0 < count < 200 and last.outputs[0].token_ids == expected_tokens([5], count)
            await idle(llm)

    run(test)


def test_deadline_ends_a_request_with_what_there_is_even_if_the_engine_hangs() -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            token_ids, last = await collect(llm.generate(ids(5), params(200), deadline=0.3))
            assert last.outputs[0].finish_reason == "error" and "deadline of 0.3 s" in str(last.error)
            assert 0 < len(token_ids) < 200 and token_ids == expected_tokens([5], len(token_ids))
            in_time, last = await collect(llm.generate(ids(5), params(5), deadline=30))
            assert (in_time, last.error) == (expected_tokens([5], 5), None)
            await idle(llm)
            hung = asyncio.ensure_future(collect(llm.generate(ids(HANG), params())))
            _, last = await collect(llm.generate(ids(6), params(), deadline=0.2))
            assert last.finished and "deadline" in str(last.error)
            hung.cancel()

    run(test)


def test_why_an_engine_died_is_told_even_if_its_descriptor_said_nothing() -> None:
    async def test() -> None:
        async with running() as llm:
            assert isinstance(llm.client, AsyncProcessClient)
            asyncio.get_running_loop().remove_reader(llm.client._connection.pull.FD)
            with pytest.raises(EngineDeadError, match="the model has a fever"):
                await collect(llm.generate(ids(RAISE), params(5)))

    asyncio.run(asyncio.wait_for(test(), 60))


def test_paused_engine_takes_requests_and_runs_them_when_it_resumes() -> None:
    async def test() -> None:
        async with running() as llm:
            await llm.pause()
            stream = asyncio.ensure_future(collect(llm.generate(ids(5), params())))
            while (stats := await llm.stats()).num_waiting == 0:
                pass
            assert stats.num_steps == (await llm.stats()).num_steps == 0
            await llm.resume()
            assert (await stream)[0] == expected_tokens([5], 8)

    run(test)


# The engine's death


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", "killed by SIGKILL"),
        ("raise", r"(?s)died of ValueError: the model has a fever.*Traceback.*in execute_model"),
        ("hang", r"(?s)not answered for 1 s and was killed.*in execute_model"),
    ],
)
def test_death_reaches_every_reader_and_caller_with_its_cause(how: str, text: str) -> None:
    async def test() -> None:
        async with running("mock:0.005", heartbeat_timeout=1.0) as llm:
            streams = [
                asyncio.ensure_future(collect(llm.generate(ids(n), params(200)))) for n in range(2, 12)
            ]
            await asyncio.sleep(0.1)
            assert not llm.is_dead and llm.dead_error is None
            await llm.check_health()
            if how == "kill":
                os.kill(llm.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            else:
                streams.append(
                    asyncio.ensure_future(collect(llm.generate(ids(RAISE if how == "raise" else HANG))))
                )
            results = await asyncio.gather(*streams, return_exceptions=True)
            assert llm.is_dead and all(result is llm.dead_error for result in results)
            for use in (
                llm.check_health,
                llm.stats,
                llm.pause,
                lambda: collect(llm.generate(ids(5), params())),
            ):
                with pytest.raises(EngineDeadError, match=text):
                    await use()
            assert llm.num_unfinished_requests == 0

    run(test)


def test_closing_ends_every_stream_and_leaves_no_task() -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            streams = [asyncio.ensure_future(collect(llm.generate(ids(n), params(200)))) for n in range(2, 5)]
            await asyncio.sleep(0.1)
            await llm.close()
            for stream in streams:
                with pytest.raises(EngineDeadError, match="closed"):
                    await stream
            assert len(asyncio.all_tasks()) == 2  # this one and the one that limits its time

    run(test)


# Soaks


async def soak(llm: AsyncLLM, num_requests: int, concurrency: int, seed: int) -> None:
    source = random.Random(seed)
    limit = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        first, length, count = source.randrange(2, 900), source.randrange(1, 120), source.randrange(1, 100)
        fate = source.choice(["read", "read", "read", "close", "abort", "deadline", "bad", "slow"])
        prompt = [first] + [source.randrange(2, 6) for _ in range(length - 1)]
        expected = expected_tokens(prompt, count)
        async with limit:
            if fate == "bad":
                with pytest.raises(RequestError):
                    await collect(llm.generate(ids(*prompt, 1000), params(count)))
                return
            deadline = source.random() * 0.1 if fate == "deadline" else None
            stream = llm.generate(ids(*prompt), params(count), f"q{number}", deadline=deadline)
            token_ids: list[int] = []
            async for output in stream:
                token_ids += output.outputs[0].token_ids
                if fate == "slow":
                    await asyncio.sleep(source.random() * 0.02)
                if fate in ("close", "abort") and source.random() < 0.2:
                    if fate == "close":
                        break
                    await llm.abort(f"q{number}")
            await stream.aclose()
            assert token_ids == expected[: len(token_ids)]
            if fate in ("read", "slow"):
                assert len(token_ids) == count

    await asyncio.gather(*(one(number) for number in range(num_requests)))


def check_soak(num_requests: int, concurrency: int) -> None:
    async def test() -> None:
        # Few blocks, so that requests are preempted.
        async with running(num_gpu_blocks_override=60, max_num_seqs=32) as llm:
            await soak(llm, 50, concurrency, seed=0)
            await idle(llm)
            this, engine = psutil.Process(), psutil.Process(llm.client.pid)  # type: ignore[attr-defined]
            before = this.num_fds(), engine.num_fds(), engine.num_threads(), len(asyncio.all_tasks())
            await soak(llm, num_requests, concurrency, seed=1)
            stats = await idle(llm)
            assert stats.num_preemptions > 0
            assert (
                this.num_fds(),
                engine.num_fds(),
                engine.num_threads(),
                len(asyncio.all_tasks()),
            ) == before
            assert not llm._streams and not llm.output_processor._sequences

    asyncio.run(asyncio.wait_for(test(), 500))


def test_soak_leaves_pool_tasks_and_descriptors_as_they_were() -> None:
    check_soak(num_requests=500, concurrency=40)


@pytest.mark.slow
def test_long_soak_leaves_pool_tasks_and_descriptors_as_they_were() -> None:
    check_soak(num_requests=6000, concurrency=100)


def test_an_engine_that_is_closed_at_once_leaves_no_error_that_nobody_reads() -> None:
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with running() as llm:
            assert (await llm.stats()).num_running == 0
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("given", ["smollm2", Path("model"), EngineArgs(model="smollm2")])
def test_a_model_in_the_place_of_a_client_names_from_args(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"call AsyncLLM\.from_args"):
        AsyncLLM(given)
