"""A seeded request gives the same tokens whatever happens around it;
the other sampling outputs equal transformers'."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.sampling_params import OutputKind
from tests.parity_reference import (
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_logits,
    run,
    tiny_llm,
    tokens_of,
)

TinyModel = Callable[..., Path]

MAX_TOKENS = 20
SEEDED = (
    SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, top_k=20, seed=2, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(
        temperature=0.8,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        seed=3,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
    SamplingParams(
        temperature=1.2,
        repetition_penalty=1.3,
        top_p=0.9,
        min_p=0.02,
        seed=4,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
)
PROMPTS = random_prompts((5, 17, 9, 20), seed=3)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with tiny_llm(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The completions of the seeded requests, each run by itself on an empty cache."""
    completions = []
    for prompt, params in zip(PROMPTS, SEEDED):
        assert llm.reset_prefix_cache()
        completions += tokens_of(run(llm, [prompt], params))
    return completions


def test_different_seeds_give_different_tokens(llm: LLM, alone: list[list[int]]) -> None:
    params = [msgspec.structs.replace(params, seed=100 + index) for index, params in enumerate(SEEDED)]
    assert all(other != one for other, one in zip(tokens_of(run(llm, PROMPTS, params)), alone))


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(llm: LLM, alone: list[list[int]]) -> None:
    strangers = random_prompts((3, 31, 12), seed=11)
    for seed in range(3):
        everyone = [
            *zip(PROMPTS, SEEDED),
            *((prompt, SamplingParams(max_tokens=seed + 4)) for prompt in strangers),
        ]
        order = list(range(len(everyone)))
        random.Random(seed).shuffle(order)
        outputs = tokens_of(run(llm, [everyone[i][0] for i in order], [everyone[i][1] for i in order]))
        assert [outputs[order.index(i)] for i in range(len(PROMPTS))] == alone


def test_a_seeded_request_gives_the_same_tokens_from_the_prefix_cache(
    llm: LLM, alone: list[list[int]]
) -> None:
    assert llm.reset_prefix_cache()
    assert tokens_of(run(llm, PROMPTS, SEEDED)) == alone
    again = run(llm, PROMPTS, SEEDED)
    assert tokens_of(again) == alone
    assert [output.num_cached_tokens for output in again] == [0, 16, 8, 16]


@pytest.mark.parametrize("budget", [1, 7])
def test_a_seeded_request_gives_the_same_tokens_in_chunks(
    model: Path, alone: list[list[int]], budget: int
) -> None:
    with tiny_llm(model, max_num_batched_tokens=budget) as llm:
        assert tokens_of(run(llm, PROMPTS, SEEDED)) == alone


@pytest.mark.parametrize("caching", [True, False])
def test_a_seeded_request_gives_the_same_tokens_when_preempted(
    model: Path, alone: list[list[int]], caching: bool
) -> None:
    with tiny_llm(
        model, max_model_len=40, num_gpu_blocks_override=1 + 8, enable_prefix_caching=caching
    ) as llm:
        assert tokens_of(run(llm, PROMPTS * 2, SEEDED * 2)) == alone * 2
        assert llm.get_metrics().num_preemptions > 1
        assert_pool_unused(llm)


def test_every_completion_of_one_prompt_is_what_its_own_seed_gives_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=40, n=3, max_tokens=12)
    output = run(llm, [PROMPTS[1]], params)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    completions = [list(completion.token_ids) for completion in output.outputs]
    assert len({tuple(tokens) for tokens in completions}) == 3
    for index, tokens in enumerate(completions):
        own = SamplingParams(temperature=1.0, seed=40 + index, max_tokens=12)
        assert tokens_of(run(llm, [PROMPTS[1]], own)) == [tokens]


def test_completions_of_one_prompt_share_its_computed_blocks(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = random_prompts((40,), seed=5)[0]
    before = llm.get_metrics().num_computed_tokens
    output = run(llm, [prompt], SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=4, ignore_eos=True))[
        0
    ]
    assert len(output.outputs) == 4
    computed = llm.get_metrics().num_computed_tokens - before
    # One computes the whole prompt; the others at most its last block.
    # Three of four tokens each are fed back.
    assert computed <= len(prompt) + 3 * 8 + 4 * 3


@pytest.mark.parametrize("budget", [None, 7, 1])
def test_logprobs_equal_log_softmax_of_transformers(model: Path, budget: int | None) -> None:
    prompt = random_prompts((30,), seed=8)[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=4, prompt_logprobs=4)
    with tiny_llm(model, max_num_batched_tokens=budget) as llm:
        # Neighbours share the steps, so the chunks of the prompt are cut in odd places.
        output = run(llm, [prompt, *random_prompts((9, 13), seed=9)], params)[0]
    completion = output.outputs[0]
    expected = reference_logits(model, prompt + list(completion.token_ids)).log_softmax(-1)
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    assert len(completion.logprobs) == len(completion.token_ids)
    positions = [*output.prompt_logprobs[1:], *completion.logprobs]
    tokens = [*prompt[1:], *completion.token_ids]
    for row, token, reported in zip(expected, tokens, positions):
        assert reported is not None
        order = row.argsort(descending=True).tolist()
        assert list(reported) == list(dict.fromkeys([token, *order[:4]]))
        for candidate, entry in reported.items():
            assert entry.rank == order.index(candidate) + 1
            assert entry.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
    summed = sum(expected[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == pytest.approx(summed, abs=1e-3)


def test_prompt_logprobs_are_complete_although_the_prompt_is_cached_or_preempted(model: Path) -> None:
    prompts = random_prompts((7, 12, 17, 15), seed=10)
    params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    with tiny_llm(model, max_model_len=40, num_gpu_blocks_override=1 + 8) as llm:
        greedy(llm, prompts, max_tokens=4)
        outputs = run(llm, prompts, params)
        assert llm.get_metrics().num_preemptions > 1
    for prompt, output in zip(prompts, outputs):
        expected = reference_logits(model, prompt).log_softmax(-1)
        assert output.prompt_logprobs is not None
        found = [
            entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:]) if entry
        ]
        wanted = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    free_run = run(llm, [PROMPTS[0]], SEEDED[0])[0].outputs[0]
    middle = len(free_run.text) // 2
    stop = free_run.text[middle : middle + 3]
    cut: dict[str, Any] = {"stop": [stop]}
    stopped = run(llm, [PROMPTS[0]], msgspec.structs.replace(SEEDED[0], **cut))[0].outputs[0]
    assert stopped.text == free_run.text[: free_run.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert len(stopped.token_ids) < len(free_run.token_ids)
    kept = run(llm, [PROMPTS[0]], msgspec.structs.replace(SEEDED[0], include_stop_str_in_output=True, **cut))
    assert kept[0].outputs[0].text == stopped.text + stop
    llm.generate({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=2), use_tqdm=False)
    assert_pool_unused(llm)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("pattern", ["[aeiou][^aeiou]", "(?i)P.*N[^x]", r"\W{2,3}\w+\x14"])
def test_a_stop_expression_ends_streams_and_whole_answers_alike(
    llm: LLM, pattern: str, include: bool
) -> None:
    free_text = run(llm, [PROMPTS[0]], SEEDED[0])[0].outputs[0].text
    match = min(
        (
            match
            for end in range(len(free_text) + 1)
            for start in range(end)
            if (match := re.compile(pattern).fullmatch(free_text, start, end))
        ),
        key=lambda match: match.span()[::-1],
    )
    params = msgspec.structs.replace(SEEDED[0], stop_regex=[pattern], include_stop_str_in_output=include)
    whole = run(llm, [PROMPTS[0]], params)[0].outputs[0]
    assert whole.text == free_text[: match.end() if include else match.start()]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", pattern)
    engine = llm.llm_engine
    engine.add_request(
        None, {"prompt_token_ids": PROMPTS[0]}, msgspec.structs.replace(params, output_kind=OutputKind.DELTA)
    )
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0] for output in engine.step()]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", pattern)
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert_pool_unused(llm)
