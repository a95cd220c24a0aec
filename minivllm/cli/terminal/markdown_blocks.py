"""Streamed Markdown, cut into blocks at the moment each one is finished, so that every block is rendered once."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Block:
    """A finished block of Markdown; of a list, one item. is_spaced: an empty line belongs above it."""

    text: str
    is_spaced: bool


@dataclass(frozen=True)
class CodeLine:
    """A finished line inside a fence. number: from 0 in each fence."""

    text: str
    language: str
    number: int


@dataclass(frozen=True)
class _Span:
    """Lines [start, end) of a block, and markdown-it's name of it."""

    start: int
    end: int
    kind: str


_FENCE = re.compile(r" {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$")
_ENDED_BY_EMPTY_LINE = ("paragraph_open", "blockquote_open", "table_open")
_ENDED_AT_ONCE = ("heading_open", "hr")


@functools.cache
def parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, but without what would hide text or reach back to earlier lines.

    HTML stays visible as text, link definitions as well, and a row of dashes does not turn what is above it into a
    heading.
    """
    from markdown_it import MarkdownIt

    return (
        MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["reference", "lheading"])
    )


class BlockSplitter:
    """Takes text as it comes and hands out what is finished: blocks, and the lines of fenced code one by one.

    A paragraph, quote or table ends with an empty line, a heading with its line, and everything where something else
    begins. ``pending``: the text that is not handed out yet.
    """

    def __init__(self) -> None:
        self.pending = ""
        self._fence = ""
        self._indent = 0
        self._language = ""
        self._num_code_lines = 0
        self._was_item = False
        self._after_empty_line = False

    @property
    def is_in_code(self) -> bool:
        return self._fence != ""

    @property
    def is_spaced(self) -> bool:
        """True if an empty line will probably belong above the block that comes next."""
        if self._fence:
            return self._num_code_lines == 0
        return self._after_empty_line or not self._was_item

    def feed(self, text: str) -> list[Block | CodeLine]:
        self.pending += text
        return self._take(is_end=False) if "\n" in text else []

    def finish(self) -> list[Block | CodeLine]:
        """What is left; an answer may end in the middle of anything."""
        if self.pending and not self.pending.endswith("\n"):
            self.pending += "\n"
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> list[Block | CodeLine]:
        pieces: list[Block | CodeLine] = []
        while True:
            before = self.pending
            self._skip_empty_lines()
            if self._fence or self._enter_fence():
                pieces += self._take_code()
            else:
                pieces += self._take_blocks(is_end)
            if self.pending == before:
                return pieces

    def _skip_empty_lines(self) -> None:
        while not self._fence and (line := self._first_line()) is not None and not line.strip():
            self._after_empty_line = True
            self._drop_lines(1)

    def _first_line(self) -> str | None:
        line, newline, _ = self.pending.partition("\n")
        return line if newline else None

    def _drop_lines(self, count: int) -> None:
        self.pending = "".join(self.pending.splitlines(keepends=True)[count:]) if count else self.pending

    def _enter_fence(self) -> bool:
        line = self._first_line()
        found = None if line is None else _FENCE.match(line)
        if found is None:
            return False
        self._fence = found[1] or found[3]
        self._indent = found.start(1 if found[1] else 3)
        self._language = (found[2] or found[4] or "").strip().partition(" ")[0]
        self._num_code_lines = 0
        self._was_item = self._after_empty_line = False
        self._drop_lines(1)
        return True

    def _take_code(self) -> list[Block | CodeLine]:
        lines: list[Block | CodeLine] = []
        while (line := self._first_line()) is not None:
            self._drop_lines(1)
            stripped = line.strip()
            if stripped.startswith(self._fence) and not stripped.strip(self._fence[0]):
                self._fence = ""
                break
            # A fence that is indented takes as much off its lines.
            indent = min(self._indent, len(line) - len(line.lstrip(" ")))
            lines.append(CodeLine(line[indent:], self._language, self._num_code_lines))
            self._num_code_lines += 1
        return lines

    def _take_blocks(self, is_end: bool) -> list[Block | CodeLine]:
        whole, _, _ = self.pending.rpartition("\n")
        lines = whole.split("\n") if whole else []
        spans = _spans(whole) if whole else []
        if spans and not is_end and not self._is_finished(spans[-1], lines):
            spans.pop()
        blocks: list[Block | CodeLine] = []
        end = 0
        for span in spans:
            if span.kind == "fence":
                break
            is_item = span.kind == "list_item_open"
            gap = not lines[span.start - 1].strip() if span.start else self._after_empty_line
            text = "\n".join(lines[end : span.end]).strip("\n")
            blocks.append(Block(text, is_spaced=gap or not (is_item and self._was_item)))
            end, self._was_item = span.end, is_item
        if end:
            self._after_empty_line = not lines[end - 1].strip()
            self._drop_lines(end)
        return blocks

    def _is_finished(self, last: _Span, lines: list[str]) -> bool:
        return last.kind in _ENDED_AT_ONCE or (last.kind in _ENDED_BY_EMPTY_LINE and not lines[-1].strip())


def _spans(markdown: str) -> list[_Span]:
    """The blocks of a text in order; a list counts as its items."""
    spans: list[_Span] = []
    for token in parser().parse(markdown):
        if token.map is None or token.nesting < 0:
            continue
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        if (token.level == 0 and not is_list) or (token.level == 1 and token.type == "list_item_open"):
            spans.append(_Span(token.map[0], token.map[1], token.type))
    return spans
