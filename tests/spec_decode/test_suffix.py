"""The suffix automaton against brute force; what the drafter remembers, and for how long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.spec_decode.drafter import DraftTask
from minivllm.spec_decode.lookup import SuffixAutomaton, SuffixDrafter

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def first_occurrence(text: list[int], part: list[int]) -> int | None:
    """Place behind the first occurrence of part in text."""
    for end in range(len(part), len(text) + 1):
        if text[end - len(part) : end] == part:
            return end
    return None


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


@given(TOKENS)
def test_the_repeated_suffix_is_the_longest_one_that_occurs_earlier(text: list[int]) -> None:
    expected = (0, 0)
    for length in range(len(text) - 1, 0, -1):
        end = first_occurrence(text[:-1], text[-length:])
        if end is not None:
            expected = (length, end)
            break
    assert automaton_of(text).repeated_suffix() == expected


@given(TOKENS, st.lists(st.integers(0, 3), max_size=12))
def test_the_longest_match_is_the_longest_suffix_of_a_query_in_the_text(
    text: list[int], query: list[int]
) -> None:
    expected = (0, 0)
    for length in range(len(query), 0, -1):
        end = first_occurrence(text, query[-length:])
        if end is not None:
            expected = (length, end)
            break
    assert automaton_of(text).longest_match(query) == expected


@given(TOKENS)
def test_the_automaton_has_at_most_two_states_per_token(text: list[int]) -> None:
    assert len(automaton_of(text)._length) <= max(2, 2 * len(text))


def propose(drafter: SuffixDrafter, tokens: list[int], max_tokens: int = 3) -> list[int] | None:
    proposals = drafter.propose([DraftTask("new", 0, np.array(tokens, dtype=np.int32), max_tokens)])
    drafter.finish("new", [])
    return proposals.get("new")


def test_what_earlier_outputs_said_is_proposed_again() -> None:
    drafter = SuffixDrafter(max_cached_tokens=100)
    drafter.finish("old", [1, 2, 3, 4, 5, 6])
    assert propose(drafter, [9, 2, 3]) == [4, 5, 6]
    assert propose(drafter, [9, 3]) is None  # one token is no match
    assert propose(drafter, [7, 8, 2, 3, 7, 8]) == [2, 3, 7]  # the request's own text says more


def test_a_request_is_followed_token_by_token() -> None:
    drafter = SuffixDrafter(max_cached_tokens=100)
    text = [1, 2, 3, 1, 2]
    for _ in range(8):
        task = DraftTask("a", 0, np.array(text, dtype=np.int32), 2)
        guess = drafter.propose([task])["a"]
        assert guess == [text[-3], text[-2]]
        text.append(guess[0])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=30), st.sampled_from([None, "x", "y"])), max_size=12
    )
)
def test_no_more_tokens_are_remembered_than_allowed(outputs: list[tuple[list[int], str | None]]) -> None:
    drafter = SuffixDrafter(max_cached_tokens=40)
    for index, (output, salt) in enumerate(outputs):
        drafter.finish(str(index), output, salt)
        remembered = [earlier for generation in drafter._generations for earlier in generation.values()]
        assert sum(len(earlier.token_ids) for earlier in remembered) <= 40
        # The latest output is never the one that is forgotten.
        kept = output[-20:]
        if kept:
            assert drafter._generations[0][salt].token_ids[-len(kept) :] == kept


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=8), st.sampled_from([None, "x", "y"])), max_size=8
    ),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.sampled_from([None, "x", "y"]),
)
def test_guesses_are_as_if_tenants_with_another_salt_did_not_exist(
    outputs: list[tuple[list[int], str | None]], text: list[int], salt: str | None
) -> None:
    shared, alone = SuffixDrafter(max_cached_tokens=1000), SuffixDrafter(max_cached_tokens=1000)
    for index, (output, other) in enumerate(outputs):
        shared.finish(str(index), output, other)
        if other == salt:
            alone.finish(str(index), output, other)
    task = DraftTask("new", 0, np.array(text, dtype=np.int32), 3, salt)
    assert shared.propose([task]) == alone.propose([task])
