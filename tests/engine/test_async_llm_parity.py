"""One engine, three ways to reach it: the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from minivllm import LLM, EngineArgs, RequestOutput, SamplingParams
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.async_llm import AsyncLLM

pytestmark = pytest.mark.smoke

PROMPTS = ["The quick brown fox", "one two three", "Grüße aus Köln", "The scheduler hands out tokens"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, n=2),
    SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=1, stop=["z"]),
    SamplingParams(temperature=0.8, max_tokens=24, top_p=0.9),
]


def engine_args(model: Path, **more: Any) -> dict[str, Any]:
    few: dict[str, Any] = {
        "num_gpu_blocks_override": 17,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "block_size": 16,
    }
    return {"model": str(model), "dtype": "float32", "enforce_eager": True, **few, **more}


def shown(output: RequestOutput) -> tuple[list[Any], list[Any]]:
    """Tokens and texts, which must be equal; logprobs, which depend on the batch in their last digits."""
    completions = output.outputs
    said = [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in completions]
    positions = [p for c in completions for p in c.logprobs or []] + [
        p or {} for p in output.prompt_logprobs or []
    ]
    logprobs = [
        (token, approx(entry.logprob, abs=1e-4))
        for position in positions
        for token, entry in position.items()
    ]
    return [output.prompt_token_ids, *said], logprobs


def test_all_three_clients_give_the_same_outputs(tiny_model: Callable[..., Path]) -> None:
    arguments = engine_args(tiny_model("llama"))

    async def stream(llm: AsyncLLM, prompt: str, params: SamplingParams) -> Any:
        async for output in llm.generate(prompt, params):
            last = output
        return shown(last)

    async def asynchronous() -> list[Any]:
        async with AsyncLLM.from_args(EngineArgs(**arguments)) as llm:
            return await asyncio.gather(*map(stream, [llm] * len(PROMPTS), PROMPTS, PARAMS))

    with LLM(**arguments) as llm:
        in_process = [shown(output) for output in llm.generate(PROMPTS, PARAMS)]
    with LLM(**arguments, multiprocess=True) as llm:
        synchronous = [shown(output) for output in llm.generate(PROMPTS, PARAMS)]
    assert synchronous == in_process
    assert asyncio.run(asynchronous()) == in_process


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_start_that_fails_fails_with_its_own_sentence(
    tiny_model: Callable[..., Path], multiprocess: bool
) -> None:
    with pytest.raises(ConfigError, match="needs 17 with the null block"):
        LLM(**engine_args(tiny_model("llama"), num_gpu_blocks_override=5), multiprocess=multiprocess)
    with pytest.raises(ModelError, match="nowhere"):
        LLM(model="/nowhere/at/all", multiprocess=multiprocess)
