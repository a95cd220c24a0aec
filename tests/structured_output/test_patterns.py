"""Expressions of schemas: what the compiled ones let through matches as Python reads them,
and as ECMA-262 does."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.structured_output.schemas.patterns import to_rust
from tests.structured_output.small_vocabulary import EOS, SmallVocabulary

ALPHABET = "ab1 _-/&[é\n\r\u2028\ufeff\x85"
LETTERS = r"a b 1 \/ - é . \d \D \w \W \s \S && ] } { \u00e9"
CLASSES = r"[ab] [^a] [a-b1] [\w-] [^\W1] [^\s\d] [[a] [a&&b] [^a&&b] [a~~b] [\]]"
ATOMS = st.sampled_from([*LETTERS.split(), *CLASSES.split()])
PIECES = st.builds(
    lambda atom, count: atom + count, ATOMS, st.sampled_from(["", "", "?", "*", "+", "{2}", "{0,1}"])
)
PATTERNS = st.recursive(
    st.builds("".join, st.lists(PIECES, min_size=1, max_size=3)),
    lambda inner: st.builds(lambda left, right: f"(?:{left}|{right})", inner, inner),
    max_leaves=3,
)


def matcher(vocabulary: SmallVocabulary, pattern: str) -> Callable[[str], bool]:
    grammar = vocabulary.grammar(json={"type": "string", "pattern": pattern}, disable_any_whitespace=True)
    byte_ids = {written[0]: token for token, written in vocabulary.bytes.items() if len(written) == 1}

    def reaches(text: str) -> bool:
        tokens = [*(byte_ids[byte] for byte in json.dumps(text, ensure_ascii=False).encode()), *EOS]
        return grammar.valid_drafts(tokens) == tokens

    return reaches


@pytest.mark.filterwarnings("ignore:Possible (nested )?set:FutureWarning")
@settings(max_examples=60, deadline=None)
@given(PATTERNS, st.sampled_from(["^{}$", "{}", "^{}", "{}$"]))
def test_what_can_be_written_matches(vocabulary: SmallVocabulary, body: str, anchors: str) -> None:
    pattern = anchors.format(body)
    try:
        reaches = matcher(vocabulary, pattern)
    except RequestError:
        return
    for text in (
        "".join(letters) for size in range(3) for letters in itertools.product(ALPHABET, repeat=size)
    ):
        if reaches(text):
            assert re.search(pattern, text), (pattern, text)


def test_expressions_mean_what_both_languages_mean(vocabulary: SmallVocabulary) -> None:
    for pattern, inside, outside in (
        (r"^\w$", "a_1", "é-"),
        (r"^\W$", "-& ", "aé_"),
        (r"^\S$", "aé-", " \ufeff\x85\u2028"),
        (r"^\s$", " \n\u2028", "a\ufeff\x85"),
        (r"^.$", "a é", "\n\r\u2028"),
        ("^[[a]$", "[a", "b]"),
        ("^[a&&b]$", "ab&", "1"),
        (r"^\cJ$", "\n", "J"),
        (r"^\ud83d\ude42|b$", "b🙂", "a"),
    ):
        reaches = matcher(vocabulary, pattern)
        assert all(reaches(letter) for letter in inside), pattern
        assert not any(reaches(letter) for letter in outside), pattern


@pytest.mark.parametrize(
    "pattern",
    [
        *[
            r"(?=a)",
            r"(?!a)",
            r"(?i)a",
            r"\bword",
            r"(a)\1",
            r"\k<a>",
            r"\Z",
            r"a++",
            r"a**",
            r"*a",
            r"[]a]",
            r"[^]",
            r"(a",
            r"a)",
            r"[b-a]",
            r"[\d-z]",
            r"[a",
            r"\ud83d",
            r"\x00",
        ],
        "\\",
    ],
)
def test_what_cannot_be_said_alike_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        to_rust(pattern)
