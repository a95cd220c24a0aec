"""Several mock engine processes behind one frontend:
streams, calls to all, and deaths that cost their own requests."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.config import EngineArgs
from minivllm.data_parallel import replicas
from minivllm.data_parallel.clients import AsyncDataParallelClient, DataParallelClient
from minivllm.data_parallel.policy import PrefixAffinity, RoundRobin, RoutingPolicy
from minivllm.data_parallel.replicas import Connect, Replica, start_engines
from minivllm.device.cores import share_of_cores
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient
from minivllm.errors import ConfigError, EngineDeadError, EngineLostError, RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.frontend.llm import LLM
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.kv_cache.blocks.continuations import MIN_COPIED_TOKENS
from minivllm.sampling_params import OutputKind, SamplingParams
from tests.engine.test_engine_process import is_gone, wait_until
from tests.frontend.test_async_llm import collect, ids, params
from tests.mock_engine import COMMAND, HANG, RAISE, expected_tokens
from tests.patience import ERROR_SECONDS, spare_seconds


def connector(model: str = "mock", size: int = 2, **arguments: Any) -> Connect:
    args = EngineArgs(model=model, data_parallel_size=size, **arguments)
    environment = share_of_cores(args.data_parallel_size)
    return lambda number: EngineConnection(args, COMMAND, environment=environment, number=number, wait=False)


def client_of(
    model: str = "mock", size: int = 2, policy: RoutingPolicy | None = None, **arguments: Any
) -> AsyncDataParallelClient:
    connect = connector(model, size, **arguments)
    return AsyncDataParallelClient(start_engines(connect, size), connect, policy or PrefixAffinity())


@asynccontextmanager
async def running(model: str = "mock", **arguments: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(client_of(model, **arguments)) as llm:
        yield llm


@contextmanager
def offline(model: str = "mock", size: int = 2, **arguments: Any) -> Iterator[LLM]:
    connect = connector(model, size, **arguments)
    client = DataParallelClient(start_engines(connect, size), connect, PrefixAffinity())
    with LLM(engine=LLMEngine(client)) as llm:
        yield llm


def engines_of(llm: AsyncLLM) -> AsyncDataParallelClient:
    assert isinstance(llm.client, AsyncDataParallelClient)
    return llm.client


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never came true"
        await asyncio.sleep(0.01)


# Serving


def test_streams_get_their_own_tokens_and_both_engines_work() -> None:
    async def test() -> None:
        async with running() as llm:
            assert llm.config.scheduler.max_num_seqs == 2 * 16
            results = await asyncio.gather(
                *(collect(llm.generate(ids(n, n), params(20))) for n in range(2, 60))
            )
            for n, (token_ids, _) in enumerate(results, start=2):
                assert token_ids == expected_tokens([n, n], 20)
            _, last = await collect(llm.generate(ids(5, 6), params(9, OutputKind.CUMULATIVE, n=4)))
            assert [one.token_ids for one in last.outputs] == [expected_tokens([5, 6], 9)] * 4
            each = [stats for stats in await llm.engine_stats() if stats is not None]
            assert len(each) == 2 and min(stats.num_computed_tokens for stats in each) > 200
            together = await llm.stats()
            assert together.num_computed_tokens == sum(stats.num_computed_tokens for stats in each)
            for engine in range(2):
                steps = await llm.recent_steps(engine=engine)
                assert [one.step for one in steps] == list(range(1, len(steps) + 1)) and steps

    run(test)


def test_an_abort_reaches_the_engine_that_has_the_request() -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            streams = [llm.generate(ids(n), params(200)) for n in range(2, 10)]
            for stream in streams:
                await anext(stream)
            assert [stats and stats.num_running for stats in await llm.engine_stats()] == [4, 4]
            for stream in streams[::2]:
                await stream.aclose()
            assert (await llm.stats()).num_running == 4
            assert engines_of(llm)._router.num_unfinished == 4
            for stream in streams:
                await stream.aclose()
            together = await llm.stats()
            assert (together.num_running, together.kv_cache_usage) == (0, 0.0)
            await engines_of(llm).call("check_integrity")

    run(test)


def test_a_conversation_finds_its_blocks_and_round_robin_does_not() -> None:
    async def hits(policy: RoutingPolicy) -> int:
        async with running(policy=policy, max_model_len=512) as llm:
            for start in range(3):
                history = [start + 5] * 100
                for turn in range(4):
                    token_ids, _ = await collect(llm.generate(ids(*history), params(20)))
                    history += [*token_ids, turn + 2]
            return (await llm.stats()).prefix_cache_hit_tokens

    async def test() -> None:
        # Turn t finds the prompt of the turn before and all but the last token of its answer,
        # but for a short end.
        ends = [100 + 21 * turn - 1 - 1 for turn in (1, 2, 3)]
        found = sum(end if end % 16 >= MIN_COPIED_TOKENS else end // 16 * 16 for end in ends)
        assert await hits(PrefixAffinity()) == 3 * found
        assert await hits(RoundRobin()) < 2 * found

    run(test)


# Calls to all


def test_what_only_idle_engines_do_is_refused_by_all_while_one_is_busy() -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            stream = llm.generate(ids(5), params(200))
            await anext(stream)
            with pytest.raises(RequestError, match="sleep needs idle engines, but 1 requests are unfinished"):
                await llm.sleep()
            with pytest.raises(RequestError, match="update_weights needs idle engines"):
                await llm.update_weights("/nowhere")
            assert await llm.reset_prefix_cache() is False
            await stream.aclose()
            assert await llm.reset_prefix_cache() is True
            assert await llm.num_recompilations() == 0
            with pytest.raises(RequestError, match="cannot be called"):
                await engines_of(llm).call("no such thing")

    run(test)


def test_paused_engines_take_requests_in_and_run_them_later() -> None:
    async def test() -> None:
        async with running() as llm:
            await llm.pause()
            tasks = [asyncio.create_task(collect(llm.generate(ids(n), params(5)))) for n in range(4, 8)]
            await asyncio.sleep(0.2)
            assert (await llm.stats()).num_steps == 0
            # One that starts again meanwhile is paused as well.
            os.kill(engines_of(llm).pids[0], signal.SIGKILL)
            await until(lambda: list(llm.num_restarts) == [1, 0])
            late = asyncio.create_task(collect(llm.generate(ids(9), params(5))))
            await asyncio.sleep(0.2)
            assert (await llm.stats()).num_steps == 0
            await llm.resume()
            assert (await late)[0] == expected_tokens([9], 5)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, EngineLostError) for result in results) == 2

    run(test)


# Deaths


def test_a_killed_engine_costs_its_own_requests_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running("mock:0.01") as llm:
            client = engines_of(llm)
            streams = [llm.generate(ids(n), params(150)) for n in range(2, 10)]
            begun = [await anext(stream) for stream in streams]
            owners = {
                one.engine_request.prompt_token_ids[0]: 0
                for one in client._router.engines[0].requests.values()
            }
            assert len(owners) == 4
            killed = time.monotonic()
            os.kill(client.pids[0], signal.SIGKILL)

            async def finish(n: int, stream: Any, tokens: list[int]) -> float | None:
                try:
                    rest, _ = await collect(stream)
                except EngineLostError as error:
                    assert n in owners and "SIGKILL" in str(error)
                    return time.monotonic() - killed
                assert n not in owners and tokens + rest == expected_tokens([n], 150)
                return None

            after = await asyncio.gather(
                *(
                    finish(n, *one)
                    for n, one in enumerate(zip(streams, (o.outputs[0].token_ids for o in begun)), 2)
                )
            )
            seconds = [one for one in after if one is not None]
            assert len(seconds) == 4 and max(seconds) < ERROR_SECONDS + spare_seconds()
            await llm.check_health()
            await until(lambda: list(llm.num_restarts) == [1, 0])
            results = await asyncio.gather(*(collect(llm.generate(ids(n), params(5))) for n in range(20, 28)))
            assert [tokens for tokens, _ in results] == [expected_tokens([n], 5) for n in range(20, 28)]
            assert all(stats and stats.num_steps for stats in await llm.engine_stats())

    with caplog.at_level(logging.WARNING):
        run(test)
    assert "Engine 0 has died, and 4 requests with it; 1 of 2 serve on. The engine process" in caplog.text
    assert "Engine 0 serves again." in caplog.text


def test_requests_that_come_while_an_engine_is_down_are_served() -> None:
    """Also those that come before its death is known."""

    async def test() -> None:
        async with running() as llm:
            client = engines_of(llm)
            os.kill(client.pids[0], signal.SIGKILL)
            os.kill(client.pids[0], 0)  # it is there until it is waited for
            wait_until(lambda: is_gone(client.pids[0]))
            results = await asyncio.gather(
                *(collect(llm.generate(ids(n), params(20))) for n in range(2, 30)), return_exceptions=True
            )
            for n, result in enumerate(results, 2):
                assert isinstance(result, EngineLostError) or result[0] == expected_tokens([n], 20)  # type: ignore[index]
            assert sum(isinstance(result, EngineLostError) for result in results) <= 14
            assert None in await llm.engine_stats() or list(llm.num_restarts) == [1, 0]
            while list(llm.num_restarts) == [0, 0]:
                assert (await collect(llm.generate(ids(7), params(3))))[0] == expected_tokens([7], 3)
                assert (await llm.stats()).num_running == 0

    run(test)


def test_completions_of_one_request_on_several_engines_die_with_one_of_them() -> None:
    """The others of them are aborted where they run."""

    async def test() -> None:
        async with running("mock:0.01") as llm:
            client = engines_of(llm)
            stream = llm.generate(ids(5), params(200, n=4))
            await anext(stream)
            assert all(one.requests for one in client._router.engines)
            os.kill(client.pids[1], signal.SIGKILL)
            with pytest.raises(EngineLostError):
                await collect(stream)
            assert client._router.num_unfinished == llm.num_unfinished_requests == 0
            assert (await llm.stats()).num_running == 0

    run(test)


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_costs_its_own_requests() -> None:
    async def test() -> None:
        async with running("mock:0.02", heartbeat_timeout=2.0) as llm:
            other = asyncio.create_task(collect(llm.generate(ids(5), params(200))))
            await until(lambda: engines_of(llm)._router.num_unfinished == 1)
            with pytest.raises(EngineLostError, match="has not answered for 2 s and was killed"):
                await collect(llm.generate(ids(HANG), params(5)))
            assert (await other)[0] == expected_tokens([5], 200)
            await until(lambda: sum(llm.num_restarts) == 1)

    run(test)


def test_engines_that_all_die_are_started_again() -> None:
    """The second one dies while the first one starts. Meanwhile every use gets an error that says so."""

    async def test() -> None:
        async with running() as llm:
            with pytest.raises(EngineLostError, match="the model has a fever"):
                await collect(llm.generate(ids(RAISE), params(5)))
            waiting = asyncio.create_task(collect(llm.generate(ids(5), params(200))))
            with pytest.raises(EngineLostError, match="the model has a fever"):
                await collect(llm.generate(ids(RAISE), params(5)))
            if engines_of(llm).num_up == 0:
                for use in (
                    waiting,
                    collect(llm.generate(ids(5), params(2))),
                    llm.stats(),
                    llm.check_health(),
                ):
                    with pytest.raises(EngineLostError):
                        await use
            assert not llm.is_dead
            await until(lambda: engines_of(llm).num_up == 2)
            await llm.check_health()
            results = await asyncio.gather(*(collect(llm.generate(ids(n), params(5))) for n in range(20, 28)))
            assert [tokens for tokens, _ in results] == [expected_tokens([n], 5) for n in range(20, 28)]

    run(test)


def test_it_is_the_end_when_all_engines_have_died_and_none_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.05)

    async def test() -> None:
        two = start_engines(connector(), 2)
        client = AsyncDataParallelClient(two, connector("no-model"), PrefixAffinity())
        async with AsyncLLM(client) as llm:
            waiting = asyncio.create_task(collect(llm.generate(ids(5), params(200))))
            await until(lambda: client._router.num_unfinished == 1)
            for pid in client.pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await waiting
            await until(lambda: llm.is_dead)
            for use in (collect(llm.generate(ids(5), params(2))), llm.stats(), llm.check_health()):
                with pytest.raises(EngineDeadError, match="none starts again: There is no such model"):
                    await use

    run(test)


def test_an_engine_that_dies_as_soon_as_it_serves_again_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The news of its death comes while it waits for its turn to be told what the others were told."""
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.05)
    start = Replica.start
    num_starts = 0

    async def test() -> None:
        async with running() as llm:
            client = engines_of(llm)
            async with client._changing:  # some call to all engines is under way

                async def dying(self: Replica, connect: Connect) -> AsyncProcessClient:
                    nonlocal num_starts
                    started = await start(self, connect)
                    num_starts += 1
                    if num_starts == 1:
                        os.kill(started.pid, signal.SIGKILL)
                        started_ones.append(started)
                    return started

                started_ones: list[AsyncProcessClient] = []
                monkeypatch.setattr(Replica, "start", dying)
                os.kill(client.pids[0], signal.SIGKILL)
                await until(lambda: bool(started_ones) and started_ones[0].dead_error is not None)
            await until(lambda: client.num_up == 2)
            results = await asyncio.gather(*(collect(llm.generate(ids(n), params(5))) for n in range(20, 28)))
            assert [tokens for tokens, _ in results] == [expected_tokens([n], 5) for n in range(20, 28)]
            assert all(stats and stats.num_steps for stats in await llm.engine_stats())

    run(test)
    assert num_starts == 2 and "Engine 0 does not start again" in caplog.text


def test_an_engine_that_stands_still_keeps_the_figures_of_the_others_from_no_one() -> None:
    async def test() -> None:
        async with running(heartbeat_timeout=600.0) as llm:
            stopped = engines_of(llm).pids[0]
            os.kill(stopped, signal.SIGSTOP)
            try:
                first, second = await llm.engine_stats()
                assert first is None and second is not None
                assert await llm.recent_steps(engine=0) == []
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert all([one is not None for one in await llm.engine_stats()])

    run(test)


def test_an_engine_that_does_not_start_again_is_tried_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.05)
    starts: list[float] = []

    async def test() -> None:
        good, bad = connector(), connector("no-model")
        two = start_engines(good, 2)

        def connect(number: int) -> EngineConnection:
            assert number == 1, "the one that died, with its GPUs"
            starts.append(time.monotonic())
            return bad(number) if len(starts) < 4 else good(number)

        async with AsyncLLM(AsyncDataParallelClient(two, connect, PrefixAffinity())) as llm:
            os.kill(engines_of(llm).pids[1], signal.SIGKILL)
            await until(lambda: list(llm.num_restarts) == [0, 1])
            assert all(await llm.engine_stats())

    run(test)
    pauses = [after - before for before, after in pairwise(starts)]
    assert len(starts) == 4 and all(pause >= 0.05 * 2**place for place, pause in enumerate(pauses))
    assert caplog.text.count("Engine 1 does not start again: There is no such model.") == 3
    assert list(tmp_path.iterdir()) == []


def test_the_pause_before_a_start_doubles_up_to_a_minute_and_a_long_life_ends_it() -> None:
    one = Replica(0, None)  # type: ignore[arg-type]
    assert [one.next_pause() for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    one.died()
    assert one.next_pause() == 60
    one._up_since -= 60
    one.died()
    assert [one.next_pause() for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("when", [pytest.param("serving", marks=pytest.mark.slow), "starting again"])
def test_closing_leaves_no_process_and_no_directory(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def test() -> None:
        async with running("mock:0.05") as llm:
            stream = llm.generate(ids(5), params(250))
            await anext(stream)
            if when == "starting again":
                client = engines_of(llm)
                idle = next(one.index for one in client._router.engines if not one.requests)
                os.kill(client.pids[idle], signal.SIGKILL)
                await until(lambda: client._replicas[idle]._starting is not None)
        with pytest.raises(EngineDeadError, match="The engine is closed"):
            await collect(stream)
        assert len(asyncio.all_tasks()) == 2  # this one, and who waits for it

    run(test)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_raises_its_own_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    good, bad = connector(), connector("no-config")
    for order in ([bad], [good, bad, good]):
        waiting = iter(order)
        with pytest.raises(ConfigError, match="max_model_len is 1, but must be 2"):
            start_engines(lambda number, waiting=waiting: next(waiting)(number), len(order))  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == []


def test_the_first_engine_starts_alone_so_that_the_others_find_what_it_compiled() -> None:
    happened: list[str] = []

    class Started:
        def __init__(self, number: int) -> None:
            self.name = f"engine {number}"
            happened.append(f"{self.name} starts")

        def wait_until_ready(self) -> None:
            happened.append(f"{self.name} serves")

    start_engines(Started, 3)  # type: ignore[arg-type]
    assert happened == [
        *("engine 0 starts", "engine 0 serves"),
        *("engine 1 starts", "engine 2 starts", "engine 1 serves", "engine 2 serves"),
    ]


def test_cores_are_divided_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for num_processes, threads in ((2, "6"), (6, "2"), (100, "1")):
        assert share_of_cores(num_processes) == {"OMP_NUM_THREADS": threads}
    assert share_of_cores(1) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share_of_cores(2) == {}


# Offline


def test_a_list_of_prompts_is_shared_and_comes_back_in_order() -> None:
    with offline() as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=9)
        outputs = llm.generate([ids(n, n) for n in range(2, 60)], greedy, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == [
            expected_tokens([n, n], 9) for n in range(2, 60)
        ]
        stats = llm.llm_engine.stats()
        assert stats.num_running == 0 and stats.num_computed_tokens == 58 * (2 + 8)
        assert llm.llm_engine.reset_prefix_cache()
        with pytest.raises(RequestError, match="cannot be called"):
            llm.llm_engine.client.call("no such thing")
    with pytest.raises(EngineDeadError, match="closed"):
        llm.llm_engine.client.stats()


def test_offline_a_death_fails_its_own_prompts_and_only_the_last_one_is_the_end() -> None:
    with offline("mock:0.002") as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=100)
        prompts = [ids(n) for n in (5, 6, RAISE, 8)]
        client = llm.llm_engine.client
        assert isinstance(client, DataParallelClient)
        pids = client.pids
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        failed = [place for place, one in enumerate(outputs) if one.error is not None]
        assert 2 in failed and len(failed) == 2
        for place, (one, prompt) in enumerate(zip(outputs, (5, 6, RAISE, 8))):
            if place in failed:
                assert one.outputs[0].finish_reason == "error"
                assert re.match(
                    "The engine that worked on this request has died: .*fever", str(one.error), re.DOTALL
                )
            else:
                assert one.outputs[0].token_ids == expected_tokens([prompt], 100)
        assert wait_until(lambda: client.pids != pids and len(client._client._router.up) == 2)
        [output] = llm.generate(ids(5), greedy, use_tqdm=False)
        assert output.outputs[0].token_ids == expected_tokens([5], 100)
        client._client._may_restart = False
        for pid in client.pids:
            os.kill(pid, signal.SIGKILL)

        def has_ended() -> bool:
            try:
                outputs = llm.generate([ids(5), ids(6)], greedy, use_tqdm=False)
            except EngineDeadError as error:
                return re.search("SIGKILL|All engines have died", str(error)) is not None
            assert any(one.error is not None for one in outputs)
            return False

        # One death may be noticed a moment before the other, and its prompts then fail by themselves.
        assert wait_until(has_ended)
