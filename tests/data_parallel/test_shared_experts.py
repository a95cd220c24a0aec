"""Engines that share experts: the tokens of one engine, for any work of others;
all end with the first that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.cli.engine.options import engine_flags
from minivllm.data_parallel.clients import AsyncDataParallelClient
from minivllm.engine.resolve import resolve
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.sampling_params import StructuredOutputs
from tests.executor.small_engine import command_of, small_engine
from tests.executor.test_divided_models import EXPERTS, WIDE
from tests.lora.lora_adapters import random_adapter
from tests.patience import ERROR_SECONDS, spare_seconds

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
PROMPTS = [{"prompt_token_ids": [5 + number, *range(30, 30 + 9 * number)]} for number in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    """Five experts of each layer, a shared MLP with a gate, prompts in chunks,
    a cache that is too small for all."""
    overrides = {**WIDE, **EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 72}
    return small_engine(tiny_model("qwen2-moe", **overrides), num_gpu_blocks_override=10, max_num_seqs=3)


@pytest.fixture(scope="module")
def expected(settings: dict[str, Any]) -> list[list[int]]:
    with LLM(**settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


async def tokens(llm: AsyncLLM, number: int) -> list[int]:
    outputs = [output async for output in llm.generate(PROMPTS[number], GREEDY)]
    return outputs[-1].outputs[0].token_ids


def test_tokens_are_those_of_one_engine_and_a_death_ends_all(
    settings: dict[str, Any], expected: list[list[int]]
) -> None:
    """Alone, while the other engine idles; all at once; one after the other; beside aborted ones;
    after a sleep."""

    async def test() -> None:
        async with AsyncLLM.from_args(EngineArgs(**settings, **SHARED)) as llm:
            client = llm.client
            assert isinstance(client, AsyncDataParallelClient)
            assert await tokens(llm, 5) == expected[5]
            assert await asyncio.gather(*(tokens(llm, number) for number in range(6))) == expected

            async def later(number: int) -> list[int]:
                await asyncio.sleep(0.02 * number)
                return await tokens(llm, number)

            aborted = [llm.generate(PROMPTS[number], GREEDY) for number in range(3)]
            for stream in aborted:
                await anext(stream)
            staggered = asyncio.gather(*map(later, range(6)))
            for stream in aborted:
                await stream.aclose()
            assert await staggered == expected
            steps = [stats.num_computed_tokens for stats in await llm.engine_stats() if stats is not None]
            assert len(steps) == 2 and min(steps) > 0
            held = await llm.collective_rpc("memory_bytes")
            assert held[0]["weights"] > held[1]["weights"]  # three experts, and two
            await llm.sleep()
            await llm.wake_up()
            assert await tokens(llm, 4) == expected[4]

            children = [psutil.Process(pid) for pid in client.pids]
            endless = SamplingParams(max_tokens=100, ignore_eos=True)
            streams = [llm.generate({"prompt_token_ids": [7 + number]}, endless) for number in range(2)]
            for stream in streams:
                await anext(stream)
            killed = time.monotonic()
            os.kill(client.pids[1], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                    async for _ in stream:
                        pass
            assert time.monotonic() - killed < ERROR_SECONDS + spare_seconds()
        assert psutil.wait_procs(children, timeout=10)[1] == []

    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"tensor_parallel_size": 2}, {"async_scheduling": True}, {"enforce_eager": False}], ids=str
)
def test_so_are_those_of_engines_with_several_workers_steps_in_flight_or_compiled_code(
    settings: dict[str, Any], expected: list[list[int]], more: dict[str, Any]
) -> None:
    with LLM(**{**settings, **SHARED, **more}) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            alone = llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)
            assert alone[0].outputs[0].token_ids == expected[3]
        assert llm.llm_engine.client.call("num_recompilations") == 0


def test_experts_beside_an_mlp_are_shared_as_well(tiny_model: Callable[..., Path]) -> None:
    settings = small_engine(tiny_model("gemma4-experts"), num_gpu_blocks_override=30, max_num_seqs=3)
    with LLM(**settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with LLM(**settings, **SHARED) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_new_weights_adapters_grammars_and_embeddings_go_with_shared_experts(
    settings: dict[str, Any], tmp_path: Path, tensor_parallel_size: int
) -> None:
    """As with one engine, one request at a time, so that the other engine has none, and several at once."""
    others, tensors = tmp_path / "others", load_file(Path(settings["model"]) / "model.safetensors")
    others.mkdir()
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, others / "model.safetensors")
    adapter = random_adapter(
        tmp_path / "adapter", Path(settings["model"]), layers=["q_proj", "v_proj", "o_proj"]
    )
    colours = StructuredOutputs(json={"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}})
    masked = SamplingParams(max_tokens=24, seed=1, structured_outputs=colours)

    def answers(llm: LLM) -> list[Any]:
        found: list[Any] = []
        for prompts in ([PROMPTS[2]], PROMPTS):
            found += [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            adapted = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
            found += [output.outputs[0].token_ids for output in adapted]
            found += [output.outputs[0].text for output in llm.generate(prompts, masked, use_tqdm=False)]
        return found

    def vectors(llm: LLM) -> list[float]:
        return [
            value
            for prompts in ([PROMPTS[2]], PROMPTS)
            for one in llm.embed(prompts)
            for value in one.embedding
        ]

    def all_of_it(llm: LLM) -> tuple[list[Any], list[float]]:
        before = answers(llm), vectors(llm)
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(str(others))
        return [*before[0], *answers(llm)], [*before[1], *vectors(llm)]

    one = {**settings, "enable_lora": True, "max_lora_rank": 8}
    with LLM(**one) as llm:
        expected = all_of_it(llm)
    half = len(expected[0]) // 2
    assert expected[0][:half] != expected[0][half:] and expected[0][0] != expected[0][1]
    with LLM(**one, **SHARED, tensor_parallel_size=tensor_parallel_size) as llm:
        got = all_of_it(llm)
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "idle"])
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_everybody_hears_of_a_kill_and_nothing_is_left(
    settings: dict[str, Any], victim: str, phase: str
) -> None:
    """Of either process of an engine, with requests in any of them."""

    async def test() -> None:
        async with AsyncLLM.from_args(EngineArgs(**settings, **SHARED, tensor_parallel_size=2)) as llm:
            family = psutil.Process().children(recursive=True)
            engine = psutil.Process(llm.client.pids[1])
            workers = [
                one for one in engine.children() if "minivllm.executor.worker_process" in command_of(one)
            ]
            assert len(workers) == 2
            endless = SamplingParams(max_tokens=100, ignore_eos=True)
            streams = [llm.generate({"prompt_token_ids": [7 + number]}, endless) for number in range(3)]
            for stream in streams if phase == "decode" else ():
                await anext(stream)
            killed = time.monotonic()
            (engine if victim == "engine" else workers[-1]).kill()
            for stream in streams if phase == "decode" else ():
                with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                    async for _ in stream:
                        pass
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                while True:
                    await llm.check_health()
                    await asyncio.sleep(0.01)
            assert time.monotonic() - killed < ERROR_SECONDS + spare_seconds()
        assert psutil.wait_procs(family, timeout=10)[1] == []

    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.slow
def test_a_chat_with_them_says_what_a_chat_with_one_says(settings: dict[str, Any]) -> None:
    """compile_in_background is what a chat does unless told otherwise."""

    def said(**more: Any) -> str:
        flags = engine_flags(EngineArgs(**{**settings, "num_gpu_blocks_override": 30}, **more))
        sampling = ["-p", "some words", "--temperature", "0", "--max-tokens", "8"]
        command = [sys.executable, "-m", "minivllm", "chat", settings["model"], *flags, *sampling]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said(**SHARED) == said() != ""


@pytest.mark.slow
def test_engines_that_pause_do_so_together(settings: dict[str, Any], expected: list[list[int]]) -> None:
    """A request that comes meanwhile, to either engine, waits until both go on."""

    async def test() -> None:
        async with AsyncLLM.from_args(EngineArgs(**settings, **SHARED)) as llm:
            running = [asyncio.create_task(tokens(llm, number)) for number in range(3)]
            await asyncio.sleep(0.05)
            await llm.pause()
            late = asyncio.create_task(tokens(llm, 4))
            done, waiting = await asyncio.wait([late], timeout=0.5)
            assert not done and waiting
            await llm.resume()
            assert await asyncio.gather(*running) == expected[:3] and await late == expected[4]

    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pipeline_parallel_size": 2}, "does not go with pipeline_parallel_size"),
        ({"disable_custom_all_reduce": True}, "does not go with disable_custom_all_reduce"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
            "does not go with kv_transfer_config",
        ),
        ({"compile_in_background": True}, "does not go with compile_in_background"),
        (
            {"speculative_config": {"method": "early_exit"}},
            "does not go with the speculative method 'early_exit'",
        ),
    ],
)
def test_what_does_not_go_with_shared_experts_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="none", **SHARED, **more)


def test_too_few_experts_are_refused(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match="has 2 experts: use that many or less"):
        resolve(EngineArgs(**small_engine(model, data_parallel_size=3, enable_expert_parallel=True)))
