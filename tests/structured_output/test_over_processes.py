"""Structures, budgets and masks survive the way to an engine process and back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import EngineArgs, RepetitionDetection, RequestOutput, SamplingParams, StructuredOutputs
from minivllm.frontend.async_llm import AsyncLLM

REGEX = "[0-9]{3}-[ab]{1,5}c"


@pytest.mark.slow
def test_structured_output_over_an_engine_process(tiny_model: Callable[..., Path]) -> None:
    wanted = [
        SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputs(regex=REGEX)),
        SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputs(regex="(a")),
        SamplingParams(
            max_tokens=60, allowed_token_ids=[7], repetition_detection=RepetitionDetection(max_pattern_size=2)
        ),
        SamplingParams(max_tokens=60, seed=1, thinking_budget=0),
    ]

    async def run() -> list[RequestOutput]:
        sizes = {"max_model_len": 128, "num_gpu_blocks_override": 40, "block_size": 16}
        engine = AsyncLLM.from_args(EngineArgs(model=str(tiny_model("llama")), enforce_eager=True, **sizes))

        async def last_output(params: SamplingParams) -> RequestOutput:
            return [output async for output in engine.generate("Hello <think>", params)][-1]

        try:
            return await asyncio.gather(*(last_output(params) for params in wanted))
        finally:
            await engine.close()

    structured, broken, circling, thinking = asyncio.run(run())
    assert re.fullmatch(REGEX, structured.outputs[0].text)
    assert broken.outputs[0].finish_reason == "error"
    assert "unclosed group" in str(broken.error)
    assert circling.outputs[0].stop_reason == "repetition"
    assert thinking.outputs[0].text.startswith("</think>")
