"""Adapters over an engine in a process of its own: loaded, refused and removed while other streams go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from minivllm import EngineArgs, LoRARequest, SamplingParams
from minivllm.errors import RequestError
from minivllm.frontend.async_llm import AsyncLLM
from tests.lora.lora_adapters import TinyModel, merged_tokens, random_adapter
from tests.parity_reference import random_prompts


def test_adapters_come_and_go_while_others_stream(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = (
        random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("first", "second"))
    )
    prompts = random_prompts((9, 12))
    args = EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        num_gpu_blocks_override=17,
        enable_lora=True,
        max_loras=2,
    )

    async def serve() -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        async with AsyncLLM.from_args(args) as llm:

            async def read(name: str, prompt: list[int], max_tokens: int, lora: LoRARequest) -> None:
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
                async for output in llm.generate({"prompt_token_ids": prompt}, params, lora=lora):
                    tokens[name] = list(output.outputs[0].token_ids)
                    if output.error is not None:
                        raise RequestError(output.error)

            streaming = asyncio.create_task(read("streams", prompts[0], 40, first))
            while "streams" not in tokens:
                await asyncio.sleep(0.001)
            with pytest.raises(RequestError, match="path is '/no/where', but must be a local directory"):
                await llm.add_lora(LoRARequest("bad", lora_path="/no/where"))
            with pytest.raises(RequestError, match="path is '/no/where', but must be a local directory"):
                await read("bad", prompts[1], 4, LoRARequest("bad", lora_path="/no/where"))
            await llm.add_lora(second)
            await read("joins", prompts[1], 8, second)
            assert await llm.list_loras() == [first, second]
            assert await llm.remove_lora("second")
            assert await llm.list_loras() == [first]
            await streaming
        return tokens

    assert asyncio.run(serve()) == {
        "streams": merged_tokens(model, first, prompts[0], 40),
        "bad": [],
        "joins": merged_tokens(model, second, prompts[1], 8),
    }
