"""The choice among given texts, by the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import RequestError
from minivllm.sampling_params import MAX_CHOICES
from minivllm.tokenizer.valid_text import check_text

SCORINGS = ("mean", "sum", "greedy")


@dataclass(frozen=True, slots=True)
class Selected:
    """How a ``select`` came out. Both entries are in the order of the choices."""

    scores: dict[str, float]
    """Choice -> mean or sum of its logprobs; with "greedy" the mean, which does not decide there."""
    logprobs: list[list[float]]
    """Of each choice: one for each of its tokens, of the raw logits."""


def check_choices(choices: Sequence[Any], scoring: str) -> list[str]:
    """The choices, checked. Raises RequestError."""
    if scoring not in SCORINGS:
        raise RequestError(f"scoring is {scoring!r}, but must be one of {', '.join(SCORINGS)}.")
    if isinstance(choices, str):
        raise RequestError(f"choices is the text {choices!r}, but must be a list of texts.")
    given = list(choices)
    if not 0 < len(given) <= MAX_CHOICES:
        raise RequestError(f"choices has {len(given)} entries, but must have 1 to {MAX_CHOICES}.")
    for choice in given:
        if not isinstance(choice, str) or not choice:
            raise RequestError(
                f"{choice!r} is among the choices, but each must be a text of at least one character."
            )
        check_text("A choice", choice)
    if len(set(given)) < len(given):
        raise RequestError(f"choices has a text twice: {given!r}. Give each once.")
    return given


def best_choice(token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], scoring: str) -> int:
    """Index of the best choice; the first of equals.
    token_ids, logprobs: of each choice, one or more each."""
    if scoring == "greedy":
        return _greedy(token_ids, logprobs)
    return max(range(len(logprobs)), key=lambda index: (score(logprobs[index], scoring), -index))


def score(logprobs: Sequence[float], scoring: str) -> float:
    return sum(logprobs) if scoring == "sum" else sum(logprobs) / len(logprobs)


def _greedy(token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> int:
    """The choice that a greedy walk through the tree of all choices reaches:
    the likeliest token at every place.

    Where a choice ends and others go on, its mean logprob stands for its next token.
    """
    left, place = list(range(len(token_ids))), 0
    while len(left) > 1:
        nexts: dict[int | None, float] = {}
        for index in left:
            goes_on = place < len(token_ids[index])
            token = token_ids[index][place] if goes_on else None
            value = logprobs[index][place] if goes_on else score(logprobs[index], "mean")
            nexts[token] = max(value, nexts.get(token, value))  # equal tokens differ by rounding at most
        best = max(nexts, key=lambda token: nexts[token])
        if best is None:
            return next(index for index in left if place >= len(token_ids[index]))
        left = [index for index in left if place < len(token_ids[index]) and token_ids[index][place] == best]
        place += 1
    return left[0]
