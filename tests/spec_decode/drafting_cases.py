"""What models that guess ahead are tested with:
prompts, ways to cut the work, and engines whose guesses are seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.spec_decode.drafter import DraftTask
from minivllm.spec_decode.eagle.drafter import EagleDraft
from tests.parity_reference import random_prompts, runner_of
from tests.spec_decode.scripted_drafter import speculation_of

_WORDS = random_prompts((6, 9, 7), seed=21)
PROMPTS = [_WORDS[0] * 3, _WORDS[1], _WORDS[2] * 2 + _WORDS[0], _WORDS[0], _WORDS[1] * 3]
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=13, ignore_eos=True, seed=3),
    SamplingParams(temperature=0.7, max_tokens=MAX_TOKENS, ignore_eos=True, seed=4, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.3, max_tokens=11, ignore_eos=True, seed=5, min_p=0.01),
    GREEDY,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7},
    "preemption": {"max_model_len": 64, "num_gpu_blocks_override": 1 + 10},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


def always_drafts(llm: LLM, count: int = 3) -> LLM:
    """However costly it is: how many guesses pay is not what is tested."""
    speculation_of(llm).lengths.choose = lambda request_id, batch_size: count  # type: ignore[method-assign]
    return llm


def recorded_guesses(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(known tokens, guesses) of every request and step from here on."""
    drafter = speculation_of(llm).drafter
    original, recorded = drafter.propose, []

    def propose(tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        known = {task.request_id: task.token_ids.tolist() for task in tasks}
        proposals = original(tasks)
        recorded.extend((known[request_id], list(guess)) for request_id, guess in proposals.items())
        return proposals

    drafter.propose = propose  # type: ignore[method-assign]
    return recorded


class HeadGuess(NamedTuple):
    """text: of which ``num_known`` tokens are known, the others guessed. logits [vocab]: of what follows.
    feature: the next one that the head foresees."""

    text: list[int]
    num_known: int
    logits: Tensor
    feature: Tensor


def draft_of(llm: LLM) -> EagleDraft:
    (draft,) = runner_of(llm).guessing_models
    assert isinstance(draft, EagleDraft)
    return draft


@contextmanager
def recorded_heads(llm: LLM) -> Iterator[list[HeadGuess]]:
    """Every guess of a head from here on."""
    draft, recorded = draft_of(llm), list[HeadGuess]()
    next_tokens, guess = draft.next_tokens, draft.model.guess

    def record(slots: np.ndarray, positions: np.ndarray) -> list[int]:
        batch = runner_of(llm).batch
        known = {request.slot: request.num_tokens for request in batch.requests.values()}
        texts = [batch.token_ids.host[slot, : p + 1].tolist() for slot, p in zip(slots, positions)]
        rows: list[tuple[Tensor, Tensor]] = []

        def keep(*args: Any) -> tuple[Tensor, Tensor]:
            logits, features = guess(*args)
            rows.append((logits.clone(), features.clone()))
            return logits, features

        draft.model.guess = keep  # type: ignore[method-assign]
        token_ids = next_tokens(slots, positions)
        for row, (slot, text) in enumerate(zip(slots.tolist(), texts)):
            logits, features = rows[-1]
            recorded.append(HeadGuess(text, known[slot], logits[row], features[row]))
        return token_ids

    draft.next_tokens = record  # type: ignore[method-assign]
    yield recorded
    draft.next_tokens, draft.model.guess = next_tokens, guess  # type: ignore[method-assign]
