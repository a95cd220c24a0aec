"""Prompt lookup against brute force over all substrings."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.spec_decode.drafter import DraftTask
from minivllm.spec_decode.lookup import NgramDrafter, longest_suffix_match

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def brute_force_match(tokens: list[int], min_length: int, max_length: int) -> int | None:
    for length in range(min(max_length, len(tokens) - 1), min_length - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return None


@given(TOKENS, st.integers(1, 4), st.integers(0, 4))
def test_the_match_is_the_latest_of_the_longest_suffix(
    tokens: list[int], min_length: int, extra: int
) -> None:
    found = longest_suffix_match(np.array(tokens, dtype=np.int32), min_length, min_length + extra)
    assert found == brute_force_match(tokens, min_length, min_length + extra)


@given(TOKENS, st.integers(1, 12))
def test_the_proposal_continues_the_text_as_it_continued_before(tokens: list[int], max_tokens: int) -> None:
    proposals = NgramDrafter(1, 5).propose([DraftTask("a", 0, np.array(tokens, dtype=np.int32), max_tokens)])
    start = brute_force_match(tokens, 1, 5)
    if start is None:
        assert proposals == {}
        return
    text = list(tokens)
    for index in range(max_tokens):  # reading on where the match ended, into what was just written
        text.append(text[start + index])
    assert proposals == {"a": text[len(tokens) :]}


def test_only_requests_with_a_match_get_a_proposal() -> None:
    known, new = np.array([5, 6, 7, 5, 6], dtype=np.int32), np.array([1, 2, 3], dtype=np.int32)
    tasks = [DraftTask("new", 0, new, 3), DraftTask("known", 1, known, 2)]
    assert NgramDrafter(2, 4).propose(tasks) == {"known": [7, 5]}
    assert NgramDrafter(3, 4).propose(tasks) == {}
