"""Real workers in processes of their own:
the same answers as in this one, and waiting callers hear of a death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.sampling_params import StructuredOutputs
from tests.executor.small_engine import command_of, small_engine

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": list(range(20, 70))}, "some words"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=9, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=1, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
]


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    return small_engine(model, **{"num_gpu_blocks_override": 24, **more})


def answers(llm: LLM) -> tuple[list[Any], list[Any]]:
    """Tokens and texts, and logprobs, which depend on the batch in their last digits."""
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    logprobs = [{token: one.logprob for token, one in each.items()} for each in outputs[0].logprobs or ()]
    return [(output.token_ids, output.text) for output in outputs], logprobs


@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_answers_are_those_of_a_worker_in_this_process(
    tiny_model: Callable[..., Path], more: dict[str, Any]
) -> None:
    given = arguments(tiny_model("llama", num_hidden_layers=2), **more)
    with LLM(**given) as llm:
        said, logprobs = answers(llm)
        expected = said, [pytest.approx(one, abs=1e-4) for one in logprobs]
        checksums = llm.llm_engine.client.call("collective_rpc", "weight_checksums", [])
    with LLM(**given, distributed_executor_backend="mp") as llm:
        call = llm.llm_engine.client.call
        assert answers(llm) == expected
        assert call("collective_rpc", "weight_checksums", []) == checksums
        with pytest.raises(RequestError, match="cannot be called on the workers"):
            call("collective_rpc", "load_model", [])
        with pytest.raises(RequestError, match="weight_checksums cannot be called so"):
            call("collective_rpc", "weight_checksums", ["too much"])
        call("sleep", 2)
        call("wake_up")
        assert answers(llm) == expected and call("num_recompilations") == 0
        [pid] = (child.pid for child in psutil.Process().children() if "worker_process" in command_of(child))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker of rank 0 was killed by SIGKILL"):
            answers(llm)
    assert not psutil.pid_exists(pid)


def test_streams_of_an_engine_process_hear_of_the_death_of_its_worker(
    tiny_model: Callable[..., Path],
) -> None:
    given = arguments(tiny_model("llama", num_hidden_layers=2), distributed_executor_backend="mp")
    before = {one.pid for one in psutil.Process().children(recursive=True)}  # Inductor's, of other tests

    async def run() -> tuple[list[str], float, list[int]]:
        async with AsyncLLM.from_args(EngineArgs(**given)) as llm:
            family = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
            [worker] = (one for one in family if "minivllm.executor.worker_process" in command_of(one))
            killed = 0.0
            errors = []
            try:
                async for _ in llm.generate(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True)):
                    if not killed:
                        killed = time.monotonic()
                        worker.kill()
            except EngineDeadError as error:
                errors.append(str(error))
            seconds = time.monotonic() - killed
            with pytest.raises(EngineDeadError) as raised:
                await llm.check_health()
            return [*errors, str(raised.value)], seconds, [one.pid for one in family]

    errors, seconds, pids = asyncio.run(run())
    assert len(errors) == 2 and all("The worker of rank 0 was killed by SIGKILL" in error for error in errors)
    assert seconds < 5.0  # 0.1 s where nothing else runs
    assert not any(map(psutil.pid_exists, pids))


def test_an_idle_engine_process_ends_with_its_worker(tiny_model: Callable[..., Path]) -> None:
    given = arguments(tiny_model("llama", num_hidden_layers=2), distributed_executor_backend="mp")

    async def run() -> str:
        async with AsyncLLM.from_args(EngineArgs(**given)) as llm:
            [worker] = (
                one
                for one in psutil.Process().children(True)
                if "minivllm.executor.worker_process" in command_of(one)
            )
            worker.kill()
            for _ in range(100):
                if llm.dead_error is not None:
                    break
                await asyncio.sleep(0.05)
            return str(llm.dead_error)

    assert "The worker of rank 0 was killed by SIGKILL" in asyncio.run(run())


def test_what_another_process_cannot_have_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="must be one of uni, mp, ray, external_launcher"):
        EngineArgs(distributed_executor_backend="dask")
    with pytest.raises(ConfigError, match="another process cannot import"):
        LLM(
            **arguments(
                tiny_model("llama"), distributed_executor_backend="mp", logits_processors=[lambda: None]
            )
        )
    with pytest.raises(ConfigError, match="needs 9 with the null block"):
        given = arguments(tiny_model("llama"), distributed_executor_backend="mp")
        LLM(**{**given, "num_gpu_blocks_override": 5})
