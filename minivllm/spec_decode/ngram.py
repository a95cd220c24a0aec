"""Prompt lookup: what followed the last few tokens when they stood here before is likely to follow again.

Free of cost and strong where answers repeat their prompt: editing, extraction, code repair. (Prompt lookup decoding,
Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.spec_decode.drafter import Drafter, DraftTask


def longest_suffix_match(token_ids: np.ndarray, min_length: int, max_length: int) -> int | None:
    """Where to go on reading: the place behind the longest earlier occurrence of a suffix of token_ids [n].

    The suffix has min_length to max_length tokens; among occurrences of the longest one the latest counts. An
    occurrence may overlap the suffix, but not be it. Returns an index from 1 to n - 1, or None.
    """
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])
    length = 1
    while len(ends) > 0 and length < max_length:
        longer = ends[ends >= length]  # with room for one more token in front
        longer = longer[token_ids[longer - length] == token_ids[-1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if len(ends) > 0 and length >= min_length else None


def repeat(token_ids: list[int], length: int) -> list[int]:
    """The first ``length`` of token_ids, from the start again when they run out: what goes on periodically, goes on."""
    return [token_ids[index % len(token_ids)] for index in range(length)]


class NgramDrafter(Drafter):
    """Looks up the longest suffix of the request's own tokens."""

    cost_per_token = 0.0

    def __init__(self, min_length: int, max_length: int) -> None:
        """min_length, max_length: tokens that must match, and beyond which longer matches do not count."""
        self._min_length, self._max_length = min_length, max_length

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        proposals = {}
        for task in tasks:
            start = longest_suffix_match(task.token_ids, self._min_length, self._max_length)
            if start is not None:
                proposals[task.request_id] = repeat(
                    task.token_ids[start : start + task.max_tokens].tolist(), task.max_tokens
                )
        return proposals
