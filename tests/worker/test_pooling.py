"""Embeddings are the pooled hidden states of transformers (float32), whatever chunks,
cache and neighbours do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM, PoolingParams, SamplingParams
from minivllm.errors import RequestError
from tests.parity_reference import (
    BLOCK_SIZE,
    assert_pool_unused,
    random_prompts,
    reference_model,
    reference_tokens,
    runner_of,
    tiny_llm,
)

TinyModel = Callable[..., Path]
PROMPTS = random_prompts((1, 8, 33, 64))


def reference_embedding(directory: Path, prompt: list[int], params: PoolingParams) -> Tensor:
    with torch.inference_mode():
        hidden = reference_model(directory).model(torch.tensor([prompt])).last_hidden_state[0]
    vector = hidden[-1] if params.pooling == "last" else hidden.mean(0)
    return vector / vector.norm() if params.normalize else vector


def embed(
    llm: LLM, prompts: list[list[int]], params: PoolingParams | None = None
) -> tuple[list[Tensor], list[int]]:
    """Vectors, and how many prompt tokens came from the prefix cache."""
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [torch.tensor(output.embedding) for output in outputs], [
        output.num_cached_tokens for output in outputs
    ]


def assert_equal_reference(directory: Path, vectors: list[Tensor], params: PoolingParams) -> None:
    for vector, prompt in zip(vectors, PROMPTS):
        torch.testing.assert_close(
            vector, reference_embedding(directory, prompt, params), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_by_layers_that_forget(tiny_model: TinyModel, pooling: str) -> None:
    """Texts of up to four windows, in chunks,
    and again from the cache where the pooling reads only the end."""
    model = tiny_model("qwen2-window", sliding_window=2 * BLOCK_SIZE)
    params = PoolingParams(pooling=pooling, normalize=False)
    with tiny_llm(model, max_num_batched_tokens=7) as llm:
        assert [group.reach for group in runner_of(llm).limits.groups] == [None, 2 * BLOCK_SIZE]
        for _ in range(2):
            vectors, num_cached = embed(llm, PROMPTS, params)
            assert_equal_reference(model, vectors, params)
        assert (sum(num_cached) > 0) == (pooling == "last")
        assert_pool_unused(llm)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
def test_embeddings_equal_pooled_hidden_states(
    tiny_model: TinyModel, family: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(family)
    caches = settings.get("enable_prefix_caching", True)
    with tiny_llm(model, **settings) as llm:
        for normalize in (True, False):
            for pooling in ("last", "mean"):
                params = PoolingParams(pooling=pooling, normalize=normalize)
                for _ in range(2):
                    vectors, num_cached = embed(llm, PROMPTS, params)
                    assert_equal_reference(model, vectors, params)
                # The last state needs only the last token; a mean needs them all.
                reads = caches and pooling == "last"
                assert num_cached == [
                    (len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE if reads else 0 for p in PROMPTS
                ]
        assert_pool_unused(llm)
        assert not runner_of(llm)._pooler._sums


def test_embedding_and_generating_share_a_batch(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    params = PoolingParams(pooling="mean", normalize=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with tiny_llm(model, max_num_batched_tokens=20) as llm:
        engine = llm.llm_engine
        for index, prompt in enumerate(PROMPTS):
            asked = {"prompt_token_ids": prompt}
            engine.submit(engine.prepare(f"text {index}", asked, greedy))
            engine.submit(engine.prepare(f"vector {index}", asked, greedy, pooling=params))
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        texts = [finished[f"text {index}"].outputs[0].token_ids for index in range(len(PROMPTS))]
        assert texts == reference_tokens(model, PROMPTS, max_tokens=12)
        vectors = [torch.tensor(finished[f"vector {index}"].embedding) for index in range(len(PROMPTS))]
        assert_equal_reference(model, vectors, params)
        assert all(finished[f"vector {index}"].outputs[0].token_ids == [] for index in range(len(PROMPTS)))


def test_a_preempted_mean_starts_over(tiny_model: TinyModel) -> None:
    """Texts that grow take the blocks of means that are being computed:
    what is preempted counts no token twice."""
    model = tiny_model("llama")
    params = PoolingParams(pooling="mean", normalize=False)
    text, prompt = random_prompts((6, 36))
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 9, "long_prefill_token_threshold": 1}
    growing = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with tiny_llm(model, **settings) as llm:
        engine = llm.llm_engine
        engine.submit(engine.prepare("text", {"prompt_token_ids": text}, growing))
        for _ in range(6):
            engine.step()
        engine.submit(
            engine.prepare("vector", {"prompt_token_ids": prompt}, SamplingParams(), pooling=params)
        )
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        assert llm.get_metrics().num_preemptions > 0
    vector = torch.tensor(finished["vector"].embedding)
    torch.testing.assert_close(vector, reference_embedding(model, prompt, params), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_embedding_compiles_nothing_after_warm_up(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with tiny_llm(model, enforce_eager=False) as llm, torch.compiler.set_stance("fail_on_recompile"):
        for pooling in ("last", "mean"):
            params = PoolingParams(pooling=pooling)
            assert_equal_reference(model, embed(llm, PROMPTS, params)[0], params)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


def test_scores_are_cosines_of_one_with_many_or_of_pairs(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    vectors = [reference_embedding(model, prompt, PoolingParams()) for prompt in PROMPTS]
    with tiny_llm(model) as llm:
        expected = [float(vectors[0] @ vector) for vector in vectors]
        assert llm.score(asked[0], asked, use_tqdm=False) == pytest.approx(expected, abs=1e-4)
        expected = [float(vectors[0] @ vectors[2]), float(vectors[1] @ vectors[3])]
        assert llm.score(asked[:2], asked[2:], use_tqdm=False) == pytest.approx(expected, abs=1e-4)
        with pytest.raises(RequestError, match="data_1 has 3 prompts and data_2 has 4"):
            llm.score(asked[:3], asked)


def test_what_cannot_be_embedded_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(RequestError, match="pooling is 'max', but must be 'last' or 'mean'"):
        PoolingParams(pooling="max")
    with tiny_llm(tiny_model("llama")) as llm:
        with pytest.raises(RequestError, match=r"Prompt 1: The prompt has 129 tokens.* max_model_len is 128"):
            llm.embed([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5] * 129}])
        with pytest.raises(
            RequestError, match="The pooling parameters are 'mean', but must be a PoolingParams"
        ):
            llm.embed("Hello", "mean")  # type: ignore[arg-type]
        assert llm.get_metrics().num_steps == 0
