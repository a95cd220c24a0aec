"""``select``: scores are those of transformers in float32, and a choice computes no more than it must."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM
from minivllm.bench.programs.requests import Asked, record
from minivllm.lang import Selected, State, join, program, run_offline, user
from minivllm.lang.choose import best_choice
from minivllm.lang.engines import SteppedEngine
from tests.lang.recorded import counted
from tests.parity_reference import assert_pool_unused, reference_logits, tiny_llm

SETTINGS: dict[str, Any] = {"max_model_len": 1200, "block_size": 64, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with tiny_llm(model, **SETTINGS) as llm:
        yield llm
        assert_pool_unused(llm)


@program(temperature=0.0)
async def choose(s: State, text: str, choices: list[str], scoring: str = "mean") -> str:
    s += text
    return await s.select("x", choices, scoring=scoring)


def selected(llm: LLM, *args: Any) -> tuple[State, Selected, list[Asked]]:
    [(recorder, outcome)] = asyncio.run(record(SteppedEngine(llm), [(choose, args)]))
    details = outcome.state.details["x"]
    assert isinstance(details, Selected) and outcome.value == outcome.state["x"]
    return outcome.state, details, recorder.asked


def words(llm: LLM, num_tokens: int, count: int) -> list[str]:
    """Texts of letters that have so many tokens each."""
    tokenizer = llm.llm_engine.tokenizer
    texts = ("".join(letters) for letters in itertools.product("qxzjkvw", repeat=3))
    fitting = (text for text in texts if len(tokenizer.encode(text)) == num_tokens)
    return list(itertools.islice(fitting, count))


def reference_scores(model: Path, prompt: list[int], choices: Sequence[list[int]]) -> list[list[float]]:
    found = []
    for choice in choices:
        logprobs = torch.log_softmax(reference_logits(model, prompt + choice).double(), -1)
        places = range(len(prompt) - 1, len(prompt) + len(choice) - 1)
        found.append([float(logprobs[place, token]) for place, token in zip(places, choice)])
    return found


@pytest.mark.parametrize("scoring", ["mean", "sum", "greedy"])
@pytest.mark.parametrize("choices", [[" fox", " dog.", " the scheduler", "x"], ["a", "b", "q", "!"]])
def test_scores_are_those_of_transformers(llm: LLM, model: Path, choices: list[str], scoring: str) -> None:
    state, details, asked = selected(llm, "The quick brown", choices, scoring)
    tokenizer = llm.llm_engine.tokenizer
    ids = [tokenizer.encode(choice) for choice in choices]
    prompt = tokenizer.encode("The quick brown")
    assert len(asked) == (1 if all(len(one) == 1 for one in ids) else len(choices))
    expected = reference_scores(model, prompt, ids)
    for got, wanted in zip(details.logprobs, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    totals = {choice: sum(one) for choice, one in zip(choices, expected)}
    means = {choice: sum(one) / len(one) for choice, one in zip(choices, expected)}
    assert details.scores == pytest.approx(totals if scoring == "sum" else means, abs=1e-4)
    if scoring != "greedy":
        assert state["x"] == max(choices, key=(totals if scoring == "sum" else means).__getitem__)
    assert state.token_ids == prompt + ids[choices.index(state["x"])]
    assert state.text == "The quick brown" + state["x"]


def test_four_choices_of_three_tokens_behind_a_thousand_compute_sixteen(llm: LLM) -> None:
    text = "q" * 1000
    tokenizer = llm.llm_engine.tokenizer
    assert len(tokenizer.encode(text)) == 1000
    choices = words(llm, 3, 4)

    @program
    async def committed(s: State) -> int:
        s += text
        await s.commit()
        with counted(llm) as computed:
            await s.select("x", choices)
            return computed()

    [outcome] = run_offline(llm, committed, [()])
    assert outcome.error is None and outcome.value == 4 * (1 + 3)


def test_choices_of_one_token_compute_what_was_appended_however_unlikely_they_are(llm: LLM) -> None:
    """More than a hundred, so the likeliest alone would leave some out."""
    tokenizer = llm.llm_engine.tokenizer
    choices = [text for text in map(chr, range(33, 1000)) if len(tokenizer.encode(text)) == 1]
    choices += [
        text for token in range(300, 400) if len(tokenizer.encode(text := tokenizer.decode([token]))) == 1
    ]
    choices = list(dict.fromkeys(choices))
    assert len(choices) > 150
    with counted(llm) as computed:
        _, details, asked = selected(llm, "An unusual beginning", choices)
    assert len(asked) == 1 and computed() == len(asked[0].token_ids)
    assert (
        len(details.scores) == len(choices)
        and sum(2.718281828**one for one in details.scores.values()) <= 1.001
    )


def test_of_equal_choices_the_first_is_taken() -> None:
    assert best_choice([[1], [2]], [[-1.0], [-1.0]], "mean") == 0
    assert best_choice([[1, 3], [1, 2]], [[-1.0, -2.0], [-1.0, -2.0]], "greedy") == 0


def test_branches_of_a_committed_text_compute_only_what_they_add(llm: LLM) -> None:
    @program(temperature=0.0, max_tokens=4, ignore_eos=True)
    async def branches(s: State) -> int:
        s += user("Words that all branches have in common, and that are computed once. ")
        await s.commit()
        parts = s.fork(8)
        for number, part in enumerate(parts):
            part += user(f"{number}")
        with counted(llm) as computed:
            await join(parts, lambda part: part.gen())
            return computed() - sum(len(part.token_ids) - len(s.token_ids) for part in parts)

    [outcome] = run_offline(llm, branches, [()])
    assert outcome.error is None and outcome.value == -8, "the last sampled token of each is not computed"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple))
def test_greedy_reaches_what_a_walk_by_the_likeliest_token_reaches(ids: list[list[int]]) -> None:
    """The probability of a token is a function of the tokens before it, as a model's is."""

    def logprob(before: Sequence[int], token: int) -> float:
        return -1.0 - hash((tuple(before), token)) % 1009 / 1009

    logprobs = [[logprob(one[:place], token) for place, token in enumerate(one)] for one in ids]
    chosen = best_choice(ids, logprobs, "greedy")
    walk: list[int] = []
    while True:
        going_on = {one[len(walk)] for one in ids if one[: len(walk)] == walk and len(one) > len(walk)}
        best = max(going_on, key=lambda token: logprob(walk, token), default=None)
        if walk in ids:
            mean = sum(logprobs[ids.index(walk)]) / len(walk)
            if best is None or mean > logprob(walk, best):
                break
        assert best is not None
        walk.append(best)
    assert ids[chosen] == walk
