"""Text for terminals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cli.terminal.terminal_text import (
    ControlCharacterFilter,
    format_bytes,
    format_duration,
    format_rate,
    printable,
)

NASTY = st.text(alphabet=st.sampled_from("ab\x1b[]0;m\x07\x9b\x9c\x9d\\P_^\n\t\r\x00\x7f(é"), max_size=60)


@given(NASTY)
def test_no_control_character_but_newline_and_tab_comes_through(text: str) -> None:
    for character in printable(text):
        assert character in "\n\t" or not (ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0)


@given(NASTY, st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_cut_anywhere_prints_the_same(text: str, cuts: list[int]) -> None:
    stream = ControlCharacterFilter()
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [stream.feed(text[start:end]) for start, end in pairwise(edges)]
    assert "".join(pieces) == printable(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t")))
def test_text_without_control_characters_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jtext", "text"),
        ("\x1b(Btext", "text"),
        ("\x1bctext", "text"),
        ("a\rb\x08c", "abc"),
        ("\x1b]never closed\nnext line", "\nnext line"),
        ("\x1bPq sixel\x1b\\text", "text"),
    ],
)
def test_known_sequences_disappear_as_a_whole(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_numbers_are_short() -> None:
    assert [format_rate(rate) for rate in (38.12, 412.4, 1900.0)] == ["38.1 tok/s", "412 tok/s", "1.9k tok/s"]
    assert [format_duration(seconds) for seconds in (0.084, 1.23)] == ["84 ms", "1.2 s"]
    assert [format_bytes(count) for count in (12, 2048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
