"""Verification alone: exact in distribution,
and token by token what would have been sampled one at a time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minivllm.messages import EngineRequest, PositionLogprobs
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.sampling_state import SamplingState
from minivllm.sampling.verification import verify
from minivllm.sampling_params import SamplingParams

VOCAB = 4
NUM_DRAWS = 50_000
LENGTH = 3
CPU = torch.device("cpu")


class MarkovModel:
    """Logits that depend on the last token only."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.0) -> None:
        self.logits = (
            torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
        )

    def after(self, token_ids: np.ndarray | list[int]) -> Tensor:
        return self.logits[torch.as_tensor(np.asarray(token_ids, dtype=np.int64))]


def new_request(name: str, params: SamplingParams, seed: int, prompt: list[int]) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        seed=seed,
        eos_token_ids=[1],
        bad_words_token_ids=[[2, 3], [0, 1, 1]],
        max_tokens=16,
        arrival_time=0.0,
    )


def generate(
    sampler: Sampler,
    state: SamplingState,
    model: MarkovModel,
    slots: np.ndarray,
    num_tokens: int,
    draft: Callable[[np.ndarray, int, int], list[list[int]]],
) -> tuple[list[list[int]], list[list[PositionLogprobs]], int]:
    """Generate num_tokens for every slot after a prompt of the token 0.

    draft(last tokens, position, room) -> drafts of each row. Returns (tokens, logprobs, rounds).
    """
    tokens: list[list[int]] = [[0] for _ in slots]
    logprobs: list[list[PositionLogprobs]] = [[] for _ in slots]
    rounds = 0
    while any(len(text) <= num_tokens for text in tokens):
        rounds += 1
        open_rows = [row for row, text in enumerate(tokens) if len(text) <= num_tokens]
        drafts: list[list[int]] = [[] for _ in open_rows]
        for position in {len(tokens[row]) for row in open_rows}:
            group = [index for index, row in enumerate(open_rows) if len(tokens[row]) == position]
            last = np.array([tokens[open_rows[index]][-1] for index in group])
            for index, guess in zip(group, draft(last, position, num_tokens - position)):
                drafts[index] = guess
        contexts = [token for row, guess in zip(open_rows, drafts) for token in (tokens[row][-1], *guess)]
        positions = np.array([len(tokens[row]) for row in open_rows])
        verified = verify(sampler, state, model.after(contexts), slots[open_rows], positions, drafts)
        for row, (new, entries) in zip(open_rows, verified):
            tokens[row] += new
            logprobs[row] += entries
    return [text[1 : 1 + num_tokens] for text in tokens], logprobs, rounds


def no_drafts(last: np.ndarray, position: int, room: int) -> list[list[int]]:
    return [[] for _ in last]


def drafters(model: MarkovModel) -> dict[str, Callable[[np.ndarray, int, int], list[list[int]]]]:
    """Good, bad and stubborn guessers."""
    likeliest, unlikeliest = model.logits.argmax(-1).numpy(), model.logits.argmin(-1).numpy()

    def follow(table: np.ndarray) -> Callable[[np.ndarray, int, int], list[list[int]]]:
        def draft(last: np.ndarray, position: int, room: int) -> list[list[int]]:
            columns = []
            for _ in range(max(0, room)):
                last = table[last]
                columns.append(last)
            return np.stack(columns, 1).tolist() if columns else [[] for _ in last]

        return draft

    return {
        "likeliest": follow(likeliest),
        "unlikeliest": follow(unlikeliest),
        "always 2": follow(np.full(VOCAB, 2)),
        "at random": lambda last, position, room: (
            np.random.default_rng(position).integers(0, VOCAB, (len(last), max(0, room))).tolist()
        ),
    }


@pytest.mark.parametrize("name", ["likeliest", "unlikeliest", "always 2", "at random"])
def test_sequences_are_distributed_as_the_model_says_whatever_is_drafted(name: str) -> None:
    """χ² over all sequences of three tokens; each row has a seed of its own, as unseeded requests do."""
    model = MarkovModel(VOCAB)
    state = SamplingState(NUM_DRAWS, VOCAB, CPU)
    state.temperature.host[:] = 1.0
    state.top_p.host[:] = 1.0
    state.seed.host[:] = np.arange(NUM_DRAWS) * 7919 + 1
    tokens, _, rounds = generate(
        Sampler(state), state, model, np.arange(NUM_DRAWS), LENGTH, drafters(model)[name]
    )
    assert rounds <= LENGTH
    observed = np.zeros((VOCAB,) * LENGTH)
    np.add.at(observed, tuple(np.array(tokens).T), 1)
    chance = model.logits.double().softmax(-1).numpy()
    expected = NUM_DRAWS * np.einsum("a,ab,bc->abc", chance[0], chance, chance)
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    # 63 degrees of freedom: 103.4 is passed once in a thousand times.
    assert chi_squared < 103.4


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.7, 1.0]),
                "top_p": st.sampled_from([1.0, 0.8]),
                "repetition_penalty": st.sampled_from([1.0, 1.3]),
                "frequency_penalty": st.sampled_from([0.0, 0.5]),
                "min_tokens": st.sampled_from([0, 4]),
                "logit_bias": st.sampled_from([None, {3: 2.0}]),
                "logprobs": st.sampled_from([None, 0, 2]),
                "bad_words": st.booleans(),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    data=st.data(),
)
def test_tokens_and_logprobs_are_those_of_sampling_one_at_a_time(
    seed: int, rows: list[dict[str, object]], data: st.DataObject
) -> None:
    model = MarkovModel(VOCAB, seed=seed, scale=0.7)
    slots = np.random.default_rng(seed).permutation(8)[: len(rows)]
    num_tokens = 7

    def run(
        draft: Callable[[np.ndarray, int, int], list[list[int]]],
    ) -> tuple[list[list[int]], list[list[PositionLogprobs]]]:
        state = SamplingState(8, VOCAB, CPU)
        for index, row in enumerate(rows):
            params = SamplingParams(max_tokens=num_tokens, **{**row, "bad_words": []})  # type: ignore[arg-type]
            request = new_request(str(index), params, seed + index, [0])
            if not row["bad_words"]:
                request = msgspec.structs.replace(request, bad_words_token_ids=[])
            state.add(int(slots[index]), request, [])
        tokens, logprobs, _ = generate(Sampler(state), state, model, slots, num_tokens, draft)
        return tokens, [entries[:num_tokens] for entries in logprobs]

    def any_draft(last: np.ndarray, position: int, room: int) -> list[list[int]]:
        guess = st.lists(st.integers(0, VOCAB - 1), max_size=max(0, room))
        return data.draw(st.lists(guess, min_size=len(last), max_size=len(last)))

    assert run(any_draft) == run(no_drafts)


def test_the_first_mismatch_ends_a_row_and_a_row_without_one_gets_a_bonus_token() -> None:
    model = MarkovModel(VOCAB, scale=3.0)
    state = SamplingState(3, VOCAB, CPU)
    best = model.logits.argmax(-1).tolist()
    right = [best[0], best[best[0]]]
    wrong = [right[0], (right[1] + 1) % VOCAB, 0]
    drafts = [right, wrong, []]
    contexts = [token for draft in drafts for token in (0, *draft)]
    verified = verify(Sampler(state), state, model.after(contexts), np.arange(3), np.array([1, 1, 1]), drafts)
    assert [tokens for tokens, _ in verified] == [[*right, best[right[1]]], right, right[:1]]
