"""A real engine tells its prefix cache as a tree, and its policy changes no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.messages import PrefixTree

FAMILIES = [[family * 7 + i % 5 + 3 for i in range(40)] for family in range(3)]
PROMPTS = [[*FAMILIES[n % 3], 50 + n, 60 + n] for n in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def arguments(model: Path, **settings: Any) -> dict[str, Any]:
    given = {
        "enforce_eager": True,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 64,
    }
    return {"model": str(model), **given, **settings}


def test_the_policy_changes_the_order_and_no_token(tiny_model: Callable[..., Path]) -> None:
    """With a cache for few of the requests."""
    model, answers = tiny_model("llama"), {}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for policy in ("fcfs", "response-ratio"):
        settings = {"scheduling_policy": policy, "num_gpu_blocks_override": 8, "max_num_seqs": 2}
        with LLM(**arguments(model, **settings)) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            answers[policy] = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers["fcfs"] == answers["response-ratio"]


def test_the_tree_of_an_engine_process_has_the_prompts_and_answers(tiny_model: Callable[..., Path]) -> None:
    async def ask() -> tuple[list[list[int]], PrefixTree | None]:
        texts = []
        args = EngineArgs(**arguments(tiny_model("llama"), num_gpu_blocks_override=60))
        async with AsyncLLM.from_args(args) as llm:
            for prompt in PROMPTS[:4]:
                *_, last = [one async for one in llm.generate({"prompt_token_ids": prompt}, GREEDY)]
                texts.append([*prompt, *last.outputs[0].token_ids][:-1])  # the last token is never computed
            with pytest.raises(RequestError, match="must be from 1 to 1000 nodes"):
                await llm.prefix_tree(limit=0)
            return texts, await llm.prefix_tree()

    texts, tree = asyncio.run(ask())
    assert tree is not None and tree.num_blocks_left_out == 0
    found: list[list[int]] = []
    open_texts: list[list[int]] = [[]]
    for node in tree.nodes:
        del open_texts[node.depth + 1 :]
        open_texts.append([*open_texts[-1], *node.token_ids])
        assert node.users == 0 and node.age >= 0 and node.num_bytes % 16 == 0
        found.append(open_texts[-1])
    assert all(text in found for text in texts)
    assert [node.num_tokens for node in tree.nodes if node.depth == 0].count(40) == 1, (
        "two texts of one family"
    )
    assert msgspec.convert(msgspec.to_builtins(tree), PrefixTree) == tree
