"""Streamed Markdown: every block once, whole, and never drawn over;
pyte is the judge of what a terminal shows."""

from __future__ import annotations

import io
import os
import re
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.cli.terminal.answer_view import (
    Block,
    BlockSplitter,
    CodeLine,
    MarkdownView,
    PlainView,
    answer_view,
)
from minivllm.cli.terminal.live_text import wrap

wcwidth = pytest.importorskip("wcwidth")
pyte = pytest.importorskip("pyte")

ANSWER = """# Title

A paragraph with **bold** words
and a second line.

1. one
2. two
   - nested

     more
10. ten

- loose

- list

```python
def f():
    return "```"

print(f())
```
| a | b |
|---|---|
| 1 | 2 |

> quoted

<div>kept</div>

[1]: http://example.com

the end"""

LINES = st.lists(
    st.sampled_from(
        [
            "",
            "# h",
            "text",
            "1. a",
            "2. b",
            "- c",
            "   deep",
            "    code",
            "```",
            "~~~py",
            "> q",
            "| a | b |",
            "|---|---|",
            "---",
        ]
    ),
    max_size=14,
).map("\n".join)


class Terminal(io.StringIO):
    """A stream that says it is a terminal. ``size``: columns, as os.get_terminal_size would not find any."""

    def isatty(self) -> bool:
        return True


def pieces_of(text: str, cuts: list[int] = []) -> list[Block | CodeLine]:  # noqa: B006
    splitter = BlockSplitter()
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    found = [piece for start, end in pairwise(edges) for piece in splitter.feed(text[start:end])]
    return found + splitter.finish()


def screen_of(written: str, columns: int = 80, rows: int = 24) -> list[str]:
    """All lines that a terminal of this size has shown in the end, those that scrolled away first."""
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return lines_of(screen)


def lines_of(screen: pyte.HistoryScreen) -> list[str]:
    gone = ["".join(line[column].data for column in range(screen.columns)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*gone, *screen.display]).rstrip().split("\n")


def shown(text: str, monkeypatch: pytest.MonkeyPatch, size: int = 1, rows: int = 24) -> list[str]:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    view = MarkdownView(stream)
    for start in range(0, len(text), size):
        view.feed(text[start : start + size])
    view.finish()
    return screen_of(stream.getvalue(), rows=rows)


@given(LINES, st.lists(st.integers(0, 90), max_size=8))
def test_however_a_text_is_cut_into_pieces_the_words_are_handed_out_once_and_in_order(
    text: str, cuts: list[int]
) -> None:
    pieces = pieces_of(text, cuts)
    handed = "\n".join(piece.text for piece in pieces).split()
    outside_fences = [line for line in text.split() if not line.startswith(("```", "~~~"))]
    assert [word for word in handed if not word.startswith(("```", "~~~"))] == outside_fences


@given(LINES)
def test_a_block_is_not_finished_before_its_end_has_come(text: str) -> None:
    """What is handed out of a beginning is a beginning of what is handed out of the whole."""
    whole = pieces_of(text)
    splitter = BlockSplitter()
    early = [piece for character in text for piece in splitter.feed(character)]
    assert early == whole[: len(early)]


def test_paragraphs_headings_items_and_lines_of_code_come_as_soon_as_they_are_finished() -> None:
    splitter = BlockSplitter()
    assert splitter.feed("# head\n") == [Block("# head", is_spaced=True)]
    assert splitter.feed("words\nmore\n") == []
    assert splitter.feed("\n") == [Block("words\nmore", is_spaced=True)]
    assert splitter.feed("- one\n- tw") == []
    assert splitter.feed("o\n- three\n") == [Block("- one", True), Block("- two", False)]
    assert splitter.feed("\n```py\nx = 1\ny") == [Block("- three", False), CodeLine("x = 1", "py", 0)]
    assert splitter.finish() == [CodeLine("y", "py", 1)]


def test_an_answer_looks_the_same_however_it_is_cut_and_shows_every_word_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(ANSWER, monkeypatch)
    assert lines == shown(ANSWER, monkeypatch, size=7) == shown(ANSWER, monkeypatch, size=1000)
    text = "\n".join(lines)
    for part in (
        "Title",
        "bold words\nand a second",
        " 1 one\n 2 two\n",
        "nested",
        "10 ten",
        'return "```"',
        "quoted",
    ):
        assert text.count(part) == 1, part
    for kept in ("<div>kept</div>", "[1]: http://example.com", "the end", " 1  2"):
        assert text.count(kept) == 1, kept
    assert "**" not in text and "\n```" not in text


def test_an_answer_of_many_windows_has_no_line_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{number}" for number in range(600)]
    paragraphs = [" ".join(words[start : start + 50]) for start in range(0, 600, 50)]
    text = "\n\n".join(paragraphs) + "\n\n```\n" + "\n".join(f"line{n}" for n in range(60)) + "\n```\n"
    lines = shown(text, monkeypatch, size=3, rows=10)
    assert " ".join(lines).split() == [*words, *(f"line{n}" for n in range(60))]


def test_wide_characters_are_neither_cut_nor_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "漢字かな交じり文" * 30 + "\n\n" + "🎉👩 é " * 40 + "\n\nend"
    joined = "".join(shown(text, monkeypatch)).replace(" ", "")
    assert joined.count("漢") == 30 and joined.count("🎉") == 40 and joined.endswith("end")


def test_a_paragraph_can_be_read_while_it_is_written_and_becomes_markdown_when_it_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    view = MarkdownView(stream)
    text = "The **beginning** of a paragraph " + "with many more words " * 9
    for character in text:
        view.feed(character)
    lines = screen_of(stream.getvalue())
    assert len(lines) == 3 and all(40 < len(line) < 80 for line in lines)
    assert " ".join(lines).split() == text.split()
    view.feed("\n\nNext")
    lines = screen_of(stream.getvalue())
    assert lines[0].startswith("The beginning of a paragraph with") and lines[-2:] == ["", "Next"]


WORDS = st.integers(1, 12).map(lambda length: "x" * length)
MARKUP = st.sampled_from(["{}", "{}", "{}", "**{}**", "`{}`", "*{}*", "漢{}", "{}é🎉"])
SEPARATORS = st.sampled_from(
    [
        " ",
        " ",
        " ",
        " ",
        " ",
        " ",
        " ",
        "\n",
        "\n\n",
        "\n- ",
        "\n1. ",
        "\n> ",
        "\n# ",
        "\n\n```py\n",
        "\n```\n",
        "\n\n",
    ]
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A Markdown text, and its words: each is there once."""
    text, words = "", []
    for number in range(draw(st.integers(0, 60))):
        word = f"{draw(WORDS)}{number}y"
        words.append(word)
        text += draw(MARKUP).format(word) + draw(SEPARATORS)
    return text, words


class Watched:
    """A MarkdownView in a pyte window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = Terminal()
        self._terminal = pyte.Stream(self.screen)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(
            "minivllm.cli.terminal.answer_view.window_size",
            lambda stream: os.terminal_size((self.screen.columns, self.screen.lines)),
        )
        self.view = MarkdownView(self._stream)

    def lines(self) -> list[str]:
        self._terminal.feed(self._stream.getvalue().replace("\n", "\r\n"))
        self._stream.seek(0)
        self._stream.truncate()
        return lines_of(self.screen)

    def words(self) -> list[str]:
        return re.findall(r"x+\d+y", "\n".join(self.lines()))


@given(answers(), st.integers(20, 90), st.integers(2, 12), st.lists(st.integers(0, 600), max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_in_the_end_every_word_is_there_once_whole_and_in_order(
    answer: tuple[str, list[str]], columns: int, rows: int, cuts: list[int]
) -> None:
    text, words = answer
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    with pytest.MonkeyPatch.context() as monkeypatch:
        window = Watched(monkeypatch, columns, rows)
        for start, end in pairwise(edges):
            window.view.feed(text[start:end])
            shown = window.words()
            assert shown == words[: len(shown)], "also while it is written"
        window.view.finish()
        assert window.words() == words
        whole = Watched(monkeypatch, columns, rows)
        whole.view.feed(text)
        whole.view.finish()
        assert window.lines() == whole.lines(), "however it was cut"


@given(answers(), st.lists(st.integers(30, 90), min_size=2, max_size=6).map(sorted), st.integers(2, 12))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_window_that_changes_its_size_shows_no_word_twice_and_loses_none(
    answer: tuple[str, list[str]], widths: list[int], rows: int
) -> None:
    """It only gets wider, since pyte cuts lines off where a terminal of today lays them out anew."""
    text, words = answer
    with pytest.MonkeyPatch.context() as monkeypatch:
        window = Watched(monkeypatch, widths[0], rows)
        for place, columns in enumerate(widths):
            window.screen.resize(rows, columns)
            window.view.feed(text[place * len(text) // len(widths) : (place + 1) * len(text) // len(widths)])
            window.lines()
        window.view.finish()
        assert window.words() == words


CHARACTERS = [*"aabb  ", "漢", "🎉", "é", "👩\u200d🔬", "❤\ufe0f", "👍🏽", "e\u0301"]


@given(st.lists(st.sampled_from(CHARACTERS), max_size=60).map("".join), st.integers(4, 20))
def test_rows_hold_all_of_a_line_and_none_is_too_long_or_cut_inside_a_word(line: str, columns: int) -> None:
    rows = wrap(line, columns)
    assert "".join(rows) == line
    for row, following in pairwise(rows):
        assert wcwidth.wcswidth(row.rstrip(" ")) <= columns
        is_cut = re.search(r"[ab]$", row) and re.match(r"[ab]", following)
        assert not is_cut or not re.search("[ 漢🎉🔬👍]", row), (
            "a word is cut only if it is longer than a row"
        )
        assert not re.match("[\u0301\u200d\ufe0f🏽]", following) and not row.endswith("\u200d")


def test_a_block_that_is_taller_than_the_window_stays_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = Watched(monkeypatch, 30, 5)
    words = [f"word{number}" for number in range(60)]
    for word in words:
        window.view.feed(f"**{word}** ")
    window.view.feed("\n\n**short**\n\n- one\n- two")
    window.view.finish()
    lines = window.lines()
    assert " ".join(lines[:-4]).split() == [f"**{word}**" for word in words]
    assert lines[-4:] == ["short", "", " • one", " • two"]


def test_a_table_that_is_too_wide_for_the_window_loses_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "| name | what |\n|---|---|\n| internationalization | incomprehensibilities |\n"
    for columns, is_drawn in ((60, True), (24, False)):
        window = Watched(monkeypatch, columns, 20)
        window.view.feed(table + "\nend")
        window.view.finish()
        shown = "\n".join(window.lines())
        assert "internationalization" in shown and "incomprehensibilities" in shown
        assert ("|---|" not in shown) == is_drawn


def test_a_long_line_of_code_keeps_its_indent_where_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Watched(monkeypatch, 20, 20)
    window.view.feed("```\none two three four five six\n```\n")
    window.view.finish()
    assert window.lines() == ["  one two three four", "  five six"]


def test_reasoning_is_dim_and_comes_as_it_is_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    view = MarkdownView(stream)
    view.feed("<thi")
    view.feed("nk>\nhm, so")
    assert "\x1b[2mhm, so\x1b[0m" in stream.getvalue()
    view.feed("</think>\n\n**Yes.**")
    view.finish()
    assert screen_of(stream.getvalue()) == ["hm, so", "", "Yes."]


def test_without_colour_markdown_is_laid_out_and_thoughts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    view = MarkdownView(stream)
    view.feed("<think>hm</think># One\n\n**two** `x`\n")
    view.finish()
    assert screen_of(stream.getvalue()) == ["(thinking)", "hm", "", "One", "", "two x"]
    assert "\x1b[1m" not in stream.getvalue() and "\x1b[2m" not in stream.getvalue()


def test_escape_sequences_of_the_model_never_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("a\x1b[31mred\x1b]0;title\x07\x9b2J b\r\n", monkeypatch) == ["ared b"]


def test_a_stream_that_is_no_terminal_or_raw_gets_the_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(answer_view(io.StringIO(), raw=False), PlainView)
    assert isinstance(answer_view(Terminal(), raw=True), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(answer_view(Terminal(), raw=False), PlainView)
    stream = io.StringIO()
    view = PlainView(stream)
    for character in ANSWER:
        view.feed(character)
    view.finish()
    assert stream.getvalue() == ANSWER + "\n"
