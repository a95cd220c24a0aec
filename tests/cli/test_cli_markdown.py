"""Streamed Markdown: every block once, whole, and never drawn over; pyte is the judge of what a terminal shows."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cli.answer_view import MarkdownView, PlainView, answer_view
from minivllm.cli.markdown_blocks import Block, BlockSplitter, CodeLine

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
    gone = ["".join(line[column].data for column in range(columns)) for line in screen.history.top]
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


def test_an_answer_looks_the_same_however_it_is_cut_and_shows_every_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(ANSWER, monkeypatch)
    assert lines == shown(ANSWER, monkeypatch, size=7) == shown(ANSWER, monkeypatch, size=1000)
    text = "\n".join(lines)
    for part in ("Title", "bold words\nand a second", " 1 one\n 2 two\n", "nested", "10 ten", 'return "```"', "quoted"):
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


def test_what_is_not_finished_shows_on_one_line_and_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    view = MarkdownView(stream)
    for character in "The beginning of a paragraph " + "with many more words " * 9:
        view.feed(character)
    [line] = screen_of(stream.getvalue())
    assert line.startswith("…") and line.endswith("with many more words") and len(line) < 80
    view.finish()
    assert screen_of(stream.getvalue())[0].startswith("The beginning of a paragraph with")


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
