"""Two real engines with a tiny model:
the tokens of one, a server with an official client, adapters and new weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minivllm import LLM, EngineArgs, LoRARequest, SamplingParams
from minivllm.data_parallel.clients import AsyncDataParallelClient
from minivllm.errors import ModelError, RequestError
from minivllm.frontend.async_llm import AsyncLLM
from tests.executor.small_engine import command_of
from tests.lora.lora_adapters import random_adapter
from tests.patience import ERROR_SECONDS, spare_seconds
from tests.server.serving import ServedCore, serve_in_thread
from tests.server.test_process import Command

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
    "block_size": 16,
}
ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 240,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def prompts_and_params() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Greedy and seeded ones, with shared beginnings, with and without what looks at every position."""
    prompts = [{"prompt_token_ids": [7] * 20 + [3 + number, 5, number]} for number in range(12)]
    params = [
        SamplingParams(
            temperature=0.0 if number % 2 else 1.0,
            seed=None if number % 4 == 0 else number,
            max_tokens=8,
            n=2 if number == 3 else 1,
            logprobs=2 if number == 5 else None,
        )
        for number in range(12)
    ]
    return prompts, params


def tokens_of(llm: LLM, **more: Any) -> list[list[list[int]]]:
    prompts, params = prompts_and_params()
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def args(tiny_model: Callable[..., Path]) -> EngineArgs:
    return EngineArgs(model=str(tiny_model("llama")), data_parallel_size=2, enable_lora=True, **SETTINGS)


@pytest.fixture(scope="module")
def server(args: EngineArgs) -> Iterator[ServedCore]:
    names = ("tiny",)
    with serve_in_thread(lambda: AsyncLLM.from_args(args), served_model_names=names) as running:
        yield running


@pytest.fixture
def client(server: ServedCore) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def engines_of(server: ServedCore) -> AsyncDataParallelClient:
    found = server.run.service.engine.client
    assert isinstance(found, AsyncDataParallelClient)
    return found


def metric(server: ServedCore, name: str) -> list[float]:
    """A metric of both engines, as Prometheus reads it."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = {
        one.labels["engine"]: one.value
        for f in families
        for one in f.samples
        if one.name == f"minivllm_{name}"
    }
    return [samples[str(index)] for index in range(2)]


def in_loop(server: ServedCore, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, server.loop).result(60)


def test_two_engines_give_the_tokens_of_one(server: ServedCore, tiny_model: Callable[..., Path]) -> None:
    """For any engine and any batch: greedy, seeded, and with the engine's own seed."""
    prompts, params = prompts_and_params()
    engine = server.run.service.engine

    async def collect(prompt: dict[str, Any], one: SamplingParams) -> list[list[int]]:
        outputs = [output async for output in engine.generate(prompt, one)]
        return [completion.token_ids for completion in outputs[-1].outputs]

    async def all_at_once() -> list[list[list[int]]]:
        return await asyncio.gather(*map(collect, prompts, params))

    with LLM(str(tiny_model("llama")), **SETTINGS) as llm:
        expected = tokens_of(llm)
    assert in_loop(server, all_at_once()) == expected
    again = in_loop(server, all_at_once())  # from the prefix cache
    assert [one for number, one in enumerate(again) if number % 4] == [
        one for number, one in enumerate(expected) if number % 4
    ]


@pytest.mark.slow
def test_offline_two_engines_give_the_tokens_of_one(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama"))
    with LLM(model, **SETTINGS) as one:
        expected, embedded = tokens_of(one), one.embed({"prompt_token_ids": [5, 6, 7]})[0].embedding
    with LLM(model, data_parallel_size=2, **SETTINGS) as two:
        assert tokens_of(two) == expected
        assert two.embed({"prompt_token_ids": [5, 6, 7]})[0].embedding == embedded
        held = two.collective_rpc("memory_bytes")
        assert len(held) == 2 and held[0]["weights"] == held[1]["weights"]


def test_official_clients_are_served_by_both(
    server: ServedCore, client: openai.OpenAI, args: EngineArgs
) -> None:
    prompts = [[9 + number] * 20 for number in range(6)]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, temperature=0)
    for prompt, choice in zip(prompts, answer.choices):
        alone = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=9, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in alone) == choice.text
    assert min(metric(server, "engine_steps_total")) > 5
    assert sum(metric(server, "prefix_cache_hits_total")) >= 6 * 16
    assert metric(server, "engine_up") == [1, 1]
    live = httpx.get(f"{server.url}/live").json()
    assert len(live["engines"]) == 2 and live["num_steps"] == metric(server, "engine_steps_total")[0]
    other = httpx.get(f"{server.url}/live", params={"engine": 1}).json()
    assert other["steps"] and other["num_steps"] == metric(server, "engine_steps_total")[1]
    assert httpx.get(f"{server.url}/live", params={"engine": 2}).status_code == 400


def test_adapters_are_those_of_all_engines(server: ServedCore, args: EngineArgs, tmp_path: Path) -> None:
    engine, router = server.run.service.engine, engines_of(server)._router
    adapter = random_adapter(tmp_path / "good", Path(args.model), seed=1)
    (tmp_path / "bad").mkdir()
    in_loop(server, engine.add_lora(adapter))
    with pytest.raises(RequestError):
        in_loop(server, engine.add_lora(LoRARequest("bad", lora_path=str(tmp_path / "bad"))))
    assert in_loop(server, engine.list_loras()) == [adapter]

    async def use(count: int) -> set[int]:
        streams = [
            engine.generate({"prompt_token_ids": [5 + n, 6]}, SamplingParams(max_tokens=50), lora=adapter)
            for n in range(count)
        ]
        for stream in streams:
            await anext(stream)
        homes = {one.index for one in router.engines if one.requests}
        with pytest.raises(RequestError, match="in use by unfinished requests"):
            await engine.remove_lora(adapter.name)
        for stream in streams:
            await stream.aclose()
        return homes

    assert in_loop(server, use(1)) < {0, 1}
    assert in_loop(server, use(2)) == {0, 1}
    assert in_loop(server, engine.remove_lora(adapter.name)) is True
    assert in_loop(server, engine.list_loras()) == []


def test_a_killed_engine_is_told_to_its_callers_within_a_second_and_the_server_stays_ready(
    server: ServedCore, client: openai.OpenAI
) -> None:
    engines = engines_of(server)
    streams = [client.completions.create(prompt=[20 + number, 4], **ENDLESS) for number in range(4)]
    for stream in streams:
        next(iter(stream))
    victims = {one.engine_request.prompt_token_ids[0] for one in engines._router.engines[1].requests.values()}
    assert 0 < len(victims) < 4
    restarts = metric(server, "engine_restarts_total")
    killed = time.monotonic()
    os.kill(engines.pids[1], signal.SIGKILL)
    for number, stream in enumerate(streams):
        if 20 + number in victims:
            with pytest.raises(
                openai.APIError, match="has died, or all are being started again: send it again"
            ) as raised:
                for _ in stream:
                    pass
            assert (
                time.monotonic() - killed < ERROR_SECONDS + spare_seconds()
                and raised.value.code == "engine_lost"
            )
    assert (
        httpx.get(f"{server.url}/ready").status_code == httpx.get(f"{server.url}/health").status_code == 200
    )
    for number, stream in enumerate(streams):
        if 20 + number not in victims:
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as patient:
        assert patient.completions.create(model="tiny", prompt=[5, 6], max_tokens=3).choices[0].finish_reason
    server.wait_until(lambda: metric(server, "engine_restarts_total") == [restarts[0], restarts[1] + 1], 60)
    assert metric(server, "engine_up") == [1, 1]
    answer = client.completions.create(model="tiny", prompt=[[30 + n] * 5 for n in range(4)], max_tokens=5)
    assert len(answer.choices) == 4 and min(metric(server, "engine_steps_total")) > 0


@pytest.mark.slow
def test_an_engine_that_starts_again_has_the_weights_and_the_adapters_of_the_others(
    args: EngineArgs, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = tiny_model("llama", rms_norm_eps=1e-5)
    with LLM(str(other), **SETTINGS) as llm:
        expected = tokens_of(llm)
    adapter = random_adapter(tmp_path / "one", Path(args.model), seed=2)
    prompts, params = prompts_and_params()

    async def test() -> None:
        async with AsyncLLM.from_args(args) as llm:
            client = llm.client
            assert isinstance(client, AsyncDataParallelClient)
            await llm.update_weights(str(other))
            await llm.add_lora(adapter)
            with pytest.raises(ModelError):
                await llm.update_weights(str(tmp_path))
            await llm.sleep()
            for index in range(2):
                os.kill(client.pids[index], signal.SIGKILL)
                while list(llm.num_restarts)[index] == 0:
                    await asyncio.sleep(0.02)
            assert await llm.is_sleeping()
            await llm.wake_up()
            assert await llm.list_loras() == [adapter]
            sums = await llm.collective_rpc("weight_checksums")
            assert sums[0] == sums[1]
            for number in (1, 2, 3):  # seeds of their own; twice, so that both engines have their turn
                for _ in range(2):
                    outputs = [output async for output in llm.generate(prompts[number], params[number])]
                    assert [one.token_ids for one in outputs[-1].outputs] == expected[number]

    asyncio.run(test())


@pytest.mark.slow
def test_the_memory_of_the_cache_is_divided(tiny_model: Callable[..., Path]) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "num_gpu_blocks_override"}
    settings |= {"max_num_seqs": 10**6, "gpu_memory_utilization": 0.01}
    sizes = []
    for size in (1, 2):
        with LLM(str(tiny_model("llama")), data_parallel_size=size, **settings) as llm:
            sizes.append(llm.llm_engine.stats().kv_cache_pools[0].num_blocks)
    assert 0.7 < sizes[1] / sizes[0] < 1.3  # of both together


@pytest.mark.slow
@pytest.mark.parametrize("kills_engines", [False, True])
def test_the_command_ends_with_all_its_engines(
    kills_engines: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also with those that were started again after kill -9 of all."""
    command = Command(tiny_model("llama"), tmp_path / "log", "--data-parallel-size", "2")
    try:
        children = psutil.Process(command.process.pid).children(recursive=True)
        engines = [child for child in children if "minivllm.engine_process.process" in command_of(child)]
        assert len(engines) == 2
        with command.client() as client:
            streams = [client.completions.create(prompt=[5 + number, 6], **ENDLESS) for number in range(2)]
            for stream in streams:
                next(iter(stream))
            if kills_engines:
                for engine in engines:
                    engine.kill()
                for stream in streams:
                    with pytest.raises(openai.APIError, match="has died"):
                        list(stream)
                assert httpx.get(f"{command.url}/health").status_code == 503
                for number in range(2):
                    command.wait_for(f"Engine {number} serves again")
                children += psutil.Process(command.process.pid).children(recursive=True)
                streams = [
                    client.completions.create(prompt=[5 + number, 6], **ENDLESS) for number in range(2)
                ]
                assert httpx.get(f"{command.url}/health").status_code == 200
            command.process.send_signal(signal.SIGTERM)
            assert [list(stream)[-1].choices[0].finish_reason for stream in streams] == ["length"] * 2
        assert command.process.wait(60) == 0
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        command.process.kill()
