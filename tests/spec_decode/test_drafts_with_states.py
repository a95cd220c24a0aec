"""Drafts for models whose layers keep states: tokens are those of the engine without drafts and of transformers,
whether guesses are right or wrong, and prefixes are found as without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kv_cache.specs import SLOTS_PER_REQUEST
from minivllm.processing.outputs import RequestOutput
from minivllm.simulation.ranks import virtual_llm
from minivllm.specs.caches import LayerCache, StateSpec
from minivllm.specs.layers import GatedDeltaSpec, Mamba2Spec, StateMixerSpec
from minivllm.worker.worker import Worker
from tests.parity_reference import (
    BLOCK_SIZE,
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tiny_settings,
    tokens_of,
)
from tests.spec_decode.eagle_heads import random_head
from tests.spec_decode.scripted_drafter import ScriptedDrafter, speculation_of
from tests.spec_decode.test_speculation_end_to_end import PARAMS, PROMPTS, assert_same

TinyModel = Callable[..., Path]
FAMILIES = ("lfm2", "qwen3.5", "granite-hybrid")
in_every_family = pytest.mark.parametrize("family", FAMILIES)
NUM_DRAFTS = 4
VOCAB_SIZE = 416
PLAIN: dict[str, list[RequestOutput]] = {}


def plain_answers(model: Path) -> list[RequestOutput]:
    """Of an engine without drafts, to PROMPTS with PARAMS."""
    if model.name not in PLAIN:
        with tiny_llm(model) as llm:
            PLAIN[model.name] = run(llm, PROMPTS, PARAMS)
    return PLAIN[model.name]


def texts_of(prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [prompt + list(c.token_ids) for prompt, output in zip(prompts, outputs) for c in output.outputs]


def drafting(method: str = "ngram", **settings: Any) -> dict[str, Any]:
    """Engine arguments that ask for drafts, whatever they cost."""
    config = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "verification_cost": 0.0, **settings}
    return {"speculative_config": config}


def let_know(llm: LLM, texts: Sequence[Sequence[int]], error_rate: float) -> LLM:
    """The drafters of all ranks know these texts, up to a rate of errors."""
    executor = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
    workers: list[Worker] = getattr(executor, "workers", None) or [executor.worker]
    for worker in workers:
        if worker.runner.speculation is not None:
            worker.runner.speculation.drafter = ScriptedDrafter(texts, error_rate, VOCAB_SIZE)
            worker.runner.speculation.lengths.choose = lambda *arguments: NUM_DRAFTS  # type: ignore[method-assign]
    return llm


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle"])
@in_every_family
def test_greedy_tokens_equal_transformers(
    tiny_model: TinyModel, tmp_path: Path, family: str, method: str
) -> None:
    model = tiny_model(family)
    more: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1},
        "draft_model": {"model": str(tiny_model("llama"))},
        "eagle": {"model": str(random_head(tmp_path / "head", "eagle"))},
    }
    with tiny_llm(model, **drafting(method, **more.get(method, {}))) as llm:
        if method in ("draft_model", "eagle"):  # random models rarely agree: it would soon give up
            speculation_of(llm).lengths.choose = lambda *arguments: 2  # type: ignore[method-assign]
        for _ in range(2):  # the second time from the prefix cache, with earlier outputs to look at
            assert greedy(llm, PROMPTS, 80) == reference_tokens(model, PROMPTS, 80)
        metrics = llm.get_metrics()
        assert metrics.num_drafts > 0
        assert metrics.num_accepted_tokens > 0 or method != "suffix"  # random models rarely repeat themselves
        assert_pool_unused(llm)


@pytest.mark.parametrize("error_rate", [0.0, 0.4, 1.0])
@in_every_family
def test_everything_is_equal_whether_guesses_are_right_or_wrong(
    tiny_model: TinyModel, family: str, error_rate: float
) -> None:
    model = tiny_model(family)
    plain = plain_answers(model)
    with let_know(tiny_llm(model, **drafting()), texts_of(PROMPTS, plain), error_rate) as llm:
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        metrics = llm.get_metrics()
        assert metrics.num_draft_tokens > 50
        assert (metrics.num_accepted_tokens > 0) == (error_rate < 1.0)
        assert_pool_unused(llm)


@pytest.mark.parametrize("budget", [9, 1])
@in_every_family
def test_chunks_of_prompts_beside_drafts_change_nothing(
    tiny_model: TinyModel, family: str, budget: int
) -> None:
    """A budget of one token leaves no room for a draft."""
    model = tiny_model(family)
    plain = plain_answers(model)
    llm = tiny_llm(model, max_num_batched_tokens=budget, **drafting())
    with let_know(llm, texts_of(PROMPTS, plain), 0.3):
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        assert (llm.get_metrics().num_accepted_tokens > 0) == (budget > 1)
        assert_pool_unused(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("error_rate", [0.0, 0.5])
@in_every_family
def test_everything_is_equal_when_requests_are_preempted(
    tiny_model: TinyModel, family: str, error_rate: float, caching: bool
) -> None:
    model = tiny_model(family)
    plain = plain_answers(model)
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 1 + 12, "enable_prefix_caching": caching}
    with let_know(tiny_llm(model, **settings, **drafting()), texts_of(PROMPTS, plain), error_rate) as llm:
        assert_same(run(llm, PROMPTS, PARAMS), plain)
        metrics = llm.get_metrics()
        assert metrics.num_preemptions > 1 and metrics.num_accepted_tokens > 0
        assert_pool_unused(llm)


@pytest.mark.parametrize("error_rate", [0.0, 0.5, 1.0])
@in_every_family
@torch.inference_mode()
def test_a_second_turn_computes_only_what_is_new_and_nothing_is_read_before_it_is_written(
    tiny_model: TinyModel, family: str, error_rate: float
) -> None:
    """NaN in all slots but the null one, and in the inputs of drafts: a read of what was not written would
    spread it."""
    model = tiny_model(family)
    prompts = random_prompts((5, 21, 16, 30))
    answers = reference_tokens(model, prompts)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]
    with let_know(tiny_llm(model, **drafting()), texts, error_rate) as llm:
        paged = runner_of(llm).paged_model
        for cache, inputs in zip(paged.caches, paged.draft_inputs, strict=True):
            assert len(inputs) == (not isinstance(cache, LayerCache))
            for tensor in () if isinstance(cache, LayerCache) else (*(one[1:-1] for one in cache), *inputs):
                tensor.fill_(torch.nan)
        assert greedy(llm, prompts) == answers
        turns = [[*text, 7, 8, 9] for text in texts]
        before = llm.get_metrics().num_computed_tokens
        assert greedy(llm, turns, 1) == reference_tokens(model, turns, 1)
        cached = [(len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE for text in texts]
        assert llm.get_metrics().num_computed_tokens - before == sum(map(len, turns)) - sum(cached)
        for cache in paged.caches:
            if not isinstance(cache, LayerCache):
                assert all(not bool(tensor[0].any()) for tensor in cache), "the null slot holds zeros"


def test_an_awake_engine_drafts_as_before_and_a_sleeping_one_keeps_no_inputs(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen3.5")
    plain = plain_answers(model)
    with let_know(tiny_llm(model, **drafting()), texts_of(PROMPTS, plain), 0.2) as llm:
        client = llm.llm_engine.client
        client.call("sleep", 1)
        assert client.call("collective_rpc", "memory_bytes", [])[0]["kv_cache"] == 0
        client.call("wake_up")
        assert_same(run(llm, PROMPTS, PARAMS), plain)


DIVIDED: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3.5": {},
    "granite-hybrid": {},
}


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["TP 2", "PP 2"]
)
@in_every_family
def test_workers_that_divide_a_model_take_drafts_as_one_does(
    tiny_model: TinyModel, family: str, layout: dict[str, int]
) -> None:
    model = tiny_model(family, **DIVIDED[family])
    with tiny_llm(model) as llm:
        plain = run(llm, PROMPTS, PARAMS)
    settings = tiny_settings(model, max_num_batched_tokens=24, **drafting(), **layout)
    with let_know(virtual_llm(**settings), texts_of(PROMPTS, plain), 0.3) as llm:
        for _ in range(2):
            assert tokens_of(run(llm, PROMPTS, PARAMS)) == tokens_of(plain)
        metrics = llm.get_metrics()
        assert metrics.num_draft_tokens > metrics.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # about twenty packages of a model with several kinds of layers
@in_every_family
def test_compiled_code_gives_the_same_tokens_and_nothing_is_compiled_again(
    tiny_model: TinyModel, family: str
) -> None:
    """One request, whose updates have one row, and several."""
    model = tiny_model(family)
    plain = plain_answers(model)
    llm = tiny_llm(model, enforce_eager=False, **drafting())
    with let_know(llm, texts_of(PROMPTS, plain), 0.3):
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (24, 9)]
        for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
            for one in params:
                answers = tokens_of(run(llm, prompts, one))
                expected = reference_tokens(model, prompts, one.max_tokens or 0)
                assert [answer[: len(text)] for answer, text in zip(answers, expected)] == expected
        assert llm.get_metrics().num_accepted_tokens > 0
        assert runner_of(llm).compiler.num_recompilations == 0


MATRICES: dict[str, StateMixerSpec] = {
    "Qwen3.5": GatedDeltaSpec(key_heads=16, key_dim=128, heads=32, value_dim=128, taps=4, norm_eps=1e-6),
    "Granite-4-H": Mamba2Spec(heads=48, head_dim=64, groups=1, state_dim=128, taps=4, norm_eps=1e-5),
}


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_kept_of_drafts_is_little_beside_states_that_are_matrices(name: str) -> None:
    """Of published sizes, in bfloat16, with 7 drafts, beside the two slots that a request may hold."""
    spec = MATRICES[name]
    state = StateSpec.of(spec, torch.bfloat16, torch.device("cpu"))
    assert 7 * spec.widths[0] * state.dtype.itemsize <= 0.05 * SLOTS_PER_REQUEST * state.num_bytes


@in_every_family
def test_drafts_take_no_more_memory_than_the_cache_may_have(tiny_model: TinyModel, family: str) -> None:
    """What is kept of them is part of it: pools are smaller for that."""
    model, sizes = tiny_model(family), []
    for more in ({}, drafting()):
        settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 16}
        with tiny_llm(model, **settings, **more) as llm:
            paged = runner_of(llm).paged_model
            sizes.append(sum(tensor.nbytes for cache in paged.caches for tensor in cache))
            kept = sum(tensor.nbytes for inputs in paged.draft_inputs for tensor in inputs)
            assert (kept > 0) == bool(more)
            sizes[-1] += kept
    assert sizes[1] <= 1.05 * sizes[0]


def test_drafters_that_would_change_states_themselves_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("lfm2")
    with pytest.raises(ConfigError, match="keep a state: each guess would change it"):
        tiny_llm(model, **drafting("early_exit", num_layers=1))
    with pytest.raises(ConfigError, match="layers that keep a state, which cannot be taken back"):
        tiny_llm(tiny_model("llama"), **drafting("draft_model", model=str(model)))
