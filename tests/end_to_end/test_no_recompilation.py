"""After warm-up nothing compiles, whatever batches come;
and requests that are aborted leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from tests.parity_reference import assert_pool_unused, tiny_llm

TinyModel = Callable[..., Path]


def random_params(draw: random.Random, longest: int) -> SamplingParams:
    """Every kind of sampling, greedy and seeded, with and without logprobs."""
    return SamplingParams(
        temperature=draw.choice([0.0, 0.7, 1.0]),
        top_p=draw.choice([1.0, 0.9]),
        top_k=draw.choice([0, 1, 30]),
        min_p=draw.choice([0.0, 0.05]),
        presence_penalty=draw.choice([0.0, 0.5]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        logit_bias=draw.choice([None, {7: 2.0}]),
        seed=draw.randrange(1000),
        n=draw.choice([1, 1, 1, 2]),
        logprobs=draw.choice([None, None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, 2]),
        min_tokens=draw.choice([0, 1]),
        max_tokens=draw.randint(1, longest),
    )


def random_prompt(draw: random.Random, longest: int) -> dict[str, list[int]]:
    """Token ids from a small set of beginnings, so that the prefix cache is hit now and then."""
    beginning = [4 + draw.randrange(3)] * draw.choice([0, 8, 16])
    own = [draw.randrange(4, 400) for _ in range(draw.choice([1, 1, 2, 3, 9, draw.randint(1, longest)]))]
    return {"prompt_token_ids": (beginning + own)[:longest]}


def drive(llm: LLM, num_steps: int, seed: int, abort_rate: float = 0.02) -> int:
    """Random arrivals and aborts for so many steps, then until everything has ended.
    Returns requests submitted.

    The load swings between a single request and more than may run at once.
    """
    draw, engine, submitted, alive = random.Random(seed), llm.llm_engine, 0, set[str]()
    longest = engine.client.config.scheduler.max_model_len // 2
    for step in range(num_steps):
        crowd = (0, 1, 2, 12)[step // 25 % 4]
        if len(alive) < crowd + 1 and draw.random() < 0.6:
            request_id = f"request-{submitted}"
            engine.add_request(request_id, random_prompt(draw, longest), random_params(draw, longest // 2))
            submitted += 1
            alive.add(request_id)
        if alive and draw.random() < abort_rate:
            victim = draw.choice(sorted(alive))
            engine.abort_request([victim])
            alive.discard(victim)
        alive -= {output.request_id for output in engine.step() if output.finished}
    while engine.has_unfinished_requests() or engine.client.has_unfinished_requests():
        engine.step()
    return submitted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_nothing_is_compiled_after_warm_up_over_300_random_steps(tiny_model: TinyModel, family: str) -> None:
    with (
        tiny_llm(
            tiny_model(family), enforce_eager=False, max_num_batched_tokens=48, num_gpu_blocks_override=18
        ) as llm,
        torch.compiler.set_stance("fail_on_recompile"),
    ):
        one = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate({"prompt_token_ids": [5]}, one, use_tqdm=False)
        llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}], one, use_tqdm=False)
        before = llm.get_metrics().num_steps
        drive(llm, num_steps=300, seed=1)
        assert llm.get_metrics().num_steps - before >= 250  # a step without any request is not counted
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]
        assert llm.get_metrics().num_preemptions > 0
        assert_pool_unused(llm)


@pytest.mark.parametrize("num_steps", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_after_random_requests_and_aborts_the_pool_is_as_at_the_start(
    tiny_model: TinyModel, num_steps: int
) -> None:
    with tiny_llm(
        tiny_model("llama"), max_model_len=64, max_num_batched_tokens=32, num_gpu_blocks_override=20
    ) as llm:
        assert drive(llm, num_steps, seed=2, abort_rate=0.1) > num_steps // 8
        assert llm.get_metrics().num_preemptions > 0
        assert_pool_unused(llm)
        scheduler = llm.llm_engine.client.core.scheduler  # type: ignore[attr-defined]
        assert not scheduler.running and not scheduler.waiting
        assert llm.reset_prefix_cache()
        pool = scheduler.kv_cache_manager.pools[0]
        assert pool.num_cached_hashes == 0
