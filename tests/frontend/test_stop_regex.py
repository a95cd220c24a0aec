"""Stop expressions; the judge is Python's ``re``, asked about every part of the text,
and ``regex`` for beginnings."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.stop_conditions.stop_regex import MAX_ELEMENTS, StopPattern, compile_stop_patterns
from minivllm.stop_conditions.stop_strings import FirstStop, StopAutomaton, StopMatcher
from minivllm.tokenizer.detokenizer import Detokenizer

CHARACTERS = "aAb1 \né"
CLASSES = [".", "[ab]", "[^a]", "[^a1]", "[a-b1]", r"\w", r"\W", r"\s", r"\S", r"\d", r"[\D]", "(?i:A)"]
ATOMS = ["a", "b", "é", r"\n", *CLASSES]
REPETITIONS = ["?", "*", "+", "{2}", "{1,3}", "{2,}", "{,2}", "{0}", "??", "*?", "+?", "{1,2}?"]


def larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: "({}|{})".format(*pair)),
        st.tuples(parts, st.sampled_from(REPETITIONS)).map(lambda pair: "(?:{}){}".format(*pair)),
    )


any_patterns = st.tuples(
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?a)"]),
    st.recursive(st.sampled_from(ATOMS), larger, max_leaves=6),
).map("".join)
patterns = any_patterns.filter(lambda pattern: re.fullmatch(pattern, "") is None)
texts = st.text(CHARACTERS, max_size=12)


class Pieces:
    """A token stream whose tokens are the numbers of given pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def cut(text: str, at: Sequence[int]) -> list[str]:
    places = sorted(min(place, len(text)) for place in at)
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


def first_match(
    text: str, patterns: Sequence[str], ignore_until: int = 0
) -> tuple[int, int, set[str]] | None:
    """(start, end, expressions) of the match that is complete first and, among those, longest;
    brute force."""
    for end in range(ignore_until + 1, len(text) + 1):
        for start in range(end):
            found = {pattern for pattern in patterns if re.fullmatch(pattern, text[start:end])}
            if found:
                return start, end, found
    return None


def emissions(detokenizer: Detokenizer, num_pieces: int) -> list[str]:
    taken = []
    for token_id in range(num_pieces):
        stopped = detokenizer.push(token_id)
        taken.append(detokenizer.take())
        if stopped:
            return taken
    detokenizer.flush()
    return [*taken, detokenizer.take()]


def matcher_of(patterns: Sequence[str], stops: Sequence[str] = ()) -> StopMatcher:
    return FirstStop([*compile_stop_patterns(patterns), *([StopAutomaton(stops)] if stops else [])])


@settings(max_examples=1000, deadline=None)
@given(
    texts,
    st.lists(patterns, min_size=1, max_size=3),
    st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(0, 12), max_size=5),
    st.booleans(),
    st.integers(0, 4),
)
@example("xaab", ["a+b"], ["ab"], [2], False, 0)
@example("aab", ["ab", "(aa|x)b"], [], [], False, 0)
def test_the_text_ends_where_the_first_complete_match_begins(
    text: str, patterns: list[str], stops: list[str], cuts: list[int], include: bool, min_tokens: int
) -> None:
    pieces = cut(text, cuts)
    detokenizer = Detokenizer(
        Pieces(pieces), matcher_of(patterns, stops), min_tokens=min_tokens, include_stop_string=include
    )
    emitted = emissions(detokenizer, len(pieces))
    found = first_match(text, [*patterns, *map(re.escape, stops)], len("".join(pieces[:min_tokens])))
    if found is None:
        assert ("".join(emitted), detokenizer.stop_match) == (text, None)
    else:
        start, end, reasons = found
        assert "".join(emitted) == text[: end if include else start]
        assert detokenizer.stop_match is not None
        assert detokenizer.stop_match.length == end - start
        assert detokenizer.stop_match.reason in reasons | {
            stop for stop in stops if re.escape(stop) in reasons
        }


@settings(max_examples=600, deadline=None)
@given(texts, patterns)
@example("aaaa", "a{2,3}b")
def test_held_back_text_is_exactly_what_may_still_begin_a_match(text: str, pattern: str) -> None:
    detokenizer = Detokenizer(Pieces(text), StopPattern(pattern))
    # A lazy repetition matches the same texts, but regex takes (?:b)*?a for a possible end of "b1".
    greedy = re.sub(r"([?*+}])\?", r"\1", pattern)
    emitted = ""
    for position in range(len(text)):
        if detokenizer.push(position):
            break
        emitted += detokenizer.take()
        read = text[: position + 1]
        beginnings = [
            start for start in range(len(read)) if regex.fullmatch(greedy, read[start:], partial=True)
        ]
        assert emitted == read[: beginnings[0] if beginnings else len(read)]


@settings(max_examples=300, deadline=None)
@given(any_patterns)
def test_an_expression_is_refused_if_and_only_if_it_matches_the_empty_text(pattern: str) -> None:
    if re.fullmatch(pattern, "") is None:
        assert compile_stop_patterns([pattern])[0].pattern == pattern
    else:
        with pytest.raises(RequestError, match="empty text"):
            compile_stop_patterns([pattern])


@settings(max_examples=300, deadline=None)
@given(
    st.characters(),
    st.sampled_from([*ATOMS, "k", "[^s]", "ß", "[à-ý]", r"(?a:\w)", r"(?u:\w)", "(?-i:k)", "(?s:.)"]),
    st.sampled_from(["", "(?i)", "(?a)", "(?s)", "(?ai)"]),
)
@example("ſ", "[^s]", "(?i)")
@example("\u212a", "k", "(?i)")
@example("é", r"(?u:\w)", "(?a)")
@example("é", r"(?a:\w)", "")
def test_a_class_contains_what_python_says(char: str, atom: str, flags: str) -> None:
    matched = StopPattern(flags + atom).scan(StopPattern.start, char)[2]
    assert (matched is not None) == (re.fullmatch(flags + atom, char) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(a|ab|aa)+c", "(.*a){12}c", "a?" * 25 + "a" * 25 + "b"]
)
def test_expressions_that_ruin_backtracking_cost_no_more_than_their_size_per_character(pattern: str) -> None:
    (matcher,) = compile_stop_patterns([pattern])
    plain_advance, num_advances = matcher._advance, 0

    def counted(places: int) -> int:
        nonlocal num_advances
        num_advances += 1
        return plain_advance(places)

    matcher._advance = counted  # type: ignore[method-assign]
    state = matcher.start
    for _ in range(200):
        state, _, match = matcher.scan(state, "a" * 10)
        assert match is None
        taken = [places for _, places in state.matches]
        assert sum(places.bit_count() for places in taken) <= matcher.num_elements
    assert num_advances <= 2000 * (matcher.num_elements + 1)


def test_an_open_match_holds_back_everything_and_releases_it_in_the_end() -> None:
    pieces = ["word "] * 3000
    detokenizer = Detokenizer(Pieces(pieces), StopPattern(r"w[^.]*\."))
    emitted = emissions(detokenizer, len(pieces))
    assert not any(emitted[:-1])
    assert emitted[-1] == "".join(pieces)


@pytest.mark.parametrize(
    ("given_patterns", "words"),
    [
        (["(a{1,1000}){1,1000}"], ["stop_regex.0", "(a{1,1000}){1,1000}", str(MAX_ELEMENTS)]),
        (["x", "(((a{1,99}){1,99}){1,99}){1,99}"], ["stop_regex.1", str(MAX_ELEMENTS)]),
        (["a{200}", "b{200}"], ["stop_regex.1", str(MAX_ELEMENTS)]),
        (["(|||||||b){1,100000}"], ["stop_regex.0", str(MAX_ELEMENTS)]),
        (["(" * 500 + "a" + ")" * 500], ["stop_regex.0", "too deep"]),
        (["ok", "(a"], ["stop_regex.1 is '(a'", "missing )"]),
        (["a{4294967295}"], ["stop_regex.0", "too large"]),
        (["a{2,1}"], ["stop_regex.0", "repeat"]),
        (["a*"], ["stop_regex.0 is 'a*'", "empty text"]),
        (["(?:){1,4000000000}"], ["stop_regex.0", "empty text"]),
        (["^a"], ["anchors"]),
        (["a$"], ["anchors"]),
        ([r"\ba"], ["word boundaries"]),
        (["a(?=b)"], ["lookaround"]),
        (["(?<!b)a"], ["lookaround"]),
        ([r"(a)\1"], ["backreferences"]),
        (["(a)?(?(1)b|c)"], ["conditional groups"]),
        (["(?>a)b"], ["atomic groups"]),
        (["a++"], ["possessive repetition"]),
    ],
)
def test_an_expression_that_cannot_be_served_is_refused_with_one_sentence(
    given_patterns: list[str], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        compile_stop_patterns(given_patterns)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.startswith("stop_regex.") and message.endswith(".") and len(message) < 300
