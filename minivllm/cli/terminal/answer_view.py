"""Answers on a screen: as they are, or as Markdown that can be read while it is written."""

from __future__ import annotations

import functools
import io
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minivllm.cli.terminal.live_text import LiveText, window_size
from minivllm.cli.terminal.terminal_text import ControlCharacterFilter, dim, styles

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.padding import Padding


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
    """CommonMark with tables and strikethrough,
    but without what would hide text or reach back to earlier lines.

    HTML stays visible as text, link definitions as well,
    and a row of dashes does not turn what is above it into a heading.
    """
    from markdown_it import MarkdownIt

    return (
        MarkdownIt("commonmark", {"html": False})
        .enable(["strikethrough", "table"])
        .disable(["reference", "lheading"])
    )


class BlockSplitter:
    """Takes text as it comes and hands out what is finished: blocks, and the lines of fenced code one by one.

    A paragraph, quote or table ends with an empty line, a heading with its line, and everything where
    something else begins. ``pending``: the text that is not handed out yet.
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
        """The rest of the answer, which may end in the middle of any construct."""
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


CODE_INDENT = "  "


class AnswerView(Protocol):
    """Where an answer goes as it comes. feed: the next piece.
    finish: the answer is over, or was interrupted."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


def answer_view(stream: TextIO, raw: bool) -> AnswerView:
    """Markdown on a terminal that understands cursor movements;
    otherwise, and if ``raw``, the text itself."""
    if raw or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(stream)
    return MarkdownView(stream)


class PlainView:
    """Prints an answer as it is, control characters removed, and ends its last line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._clean = ControlCharacterFilter()
        self._ends_line = True

    def feed(self, text: str) -> None:
        text = self._clean.feed(text)
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._ends_line = text.endswith("\n")

    def finish(self) -> None:
        if not self._ends_line:
            self._stream.write("\n")
            self._stream.flush()
            self._ends_line = True


class MarkdownView:
    """Renders Markdown on a terminal, block by block.

    What is not finished shows as it is written, wrapped between words. When a block is finished, its text is
    erased and the rendered block is printed once in its place, code line by line. A terminal cannot take back
    what has scrolled away, so a block that is taller than the window stays as it was written. Reasoning
    between ``<think>`` and ``</think>`` is printed dim as it comes.
    """

    def __init__(self, stream: TextIO) -> None:
        from minivllm.server.parsers.events import PlainText
        from minivllm.server.parsers.reasoning import ThinkParser

        self._stream = stream
        self._frame = io.StringIO()  # printed at once, so that nothing flickers
        self._styled = styles(stream)
        self._clean = ControlCharacterFilter()
        self._thinking = ThinkParser(PlainText(), starts_inside=False)
        self._splitter = BlockSplitter()
        self._live = LiveText(self._frame.write, self._window)
        self._thoughts = LiveText(self._frame.write, self._window, lambda text: dim(text, stream))
        self._code: list[str] = []
        self._is_thinking = False
        self._has_gap = True
        """Nothing is above, or an empty row."""

    def feed(self, text: str) -> None:
        self._show(self._thinking.feed(self._clean.feed(text)))
        self._flush()

    def finish(self) -> None:
        self._show(self._thinking.finish())
        self._leave_thoughts()
        pieces = self._splitter.finish()
        if self._live.take_back():
            self._print(pieces)
        self._live.end()
        self._flush()

    def _flush(self) -> None:
        self._stream.write(self._frame.getvalue())
        self._stream.flush()
        self._frame.seek(0)
        self._frame.truncate()

    def _window(self) -> os.terminal_size:
        return window_size(self._stream)

    def _show(self, events: list[Any]) -> None:
        from minivllm.server.parsers.events import Content, Reasoning

        for event in events:
            if isinstance(event, Reasoning):
                if not self._is_thinking and not self._styled:
                    self._frame.write("(thinking)\n")
                self._is_thinking = True
                self._thoughts.write(event.text)
            elif isinstance(event, Content):
                self._leave_thoughts()
                for line in re.findall(r"[^\n]*\n|[^\n]+", event.text):
                    self._add(line)

    def _leave_thoughts(self) -> None:
        if self._is_thinking:
            self._thoughts.end()
            self._is_thinking = self._has_gap = False

    def _add(self, text: str) -> None:
        """The next piece of the answer; a newline comes only at its end."""
        lines = (self._splitter.pending + text).split("\n")
        self._write_live(text)
        pieces = self._splitter.feed(text)
        num_taken = len(lines) - 1 - self._splitter.pending.count("\n")
        if not num_taken:
            return
        if self._live.take_back():
            self._print(pieces)
            self._write_live(self._splitter.pending)
            return
        self._live.keep(num_taken)
        for piece in pieces:
            if isinstance(piece, CodeLine):
                self._remember(piece)
        self._has_gap = not lines[num_taken - 1].strip()

    def _write_live(self, text: str) -> None:
        if text and self._live.is_fresh:
            if self._splitter.is_spaced and not self._has_gap and text != "\n":
                self._live.leave_gap()
            if self._splitter.is_in_code:
                self._live.write(CODE_INDENT)
        self._live.write(text)

    def _print(self, pieces: list[Block | CodeLine]) -> None:
        for piece in pieces:
            is_spaced = piece.is_spaced if isinstance(piece, Block) else piece.number == 0
            if is_spaced and not self._has_gap:
                self._frame.write("\n")
            self._has_gap = False
            # A new one each time: the window may have another width by now.
            console = self._console()
            print_unpadded(
                console,
                render_whole(console, piece.text) if isinstance(piece, Block) else self._highlighted(piece),
            )

    def _console(self) -> Console:
        from rich.console import Console

        return Console(
            file=self._frame,
            force_terminal=True,
            color_system="auto" if self._styled else None,
            width=self._window().columns,
            highlight=False,
        )

    def _remember(self, line: CodeLine) -> None:
        if line.number == 0:
            self._code = []
        self._code.append(line.text.expandtabs(4))

    def _highlighted(self, line: CodeLine) -> Padding:
        """The line as it looks at the end of the code so far: colours depend on what is above."""
        from rich.padding import Padding
        from rich.syntax import Syntax

        self._remember(line)
        syntax = Syntax("", line.language or "text", theme="ansi_dark", background_color="default")
        text = syntax.highlight("\n".join(self._code)).split("\n", allow_blank=True)[line.number]
        text.rstrip()
        return Padding(text, (0, 0, 0, len(CODE_INDENT)))


def render_block(text: str) -> Any:
    """A block of Markdown for rich: line breaks kept, headings at the left, the address of a link visible."""
    from rich.console import ConsoleOptions, RenderResult
    from rich.markdown import Heading, Markdown

    class LeftHeading(Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            self.text.justify = "left"
            yield self.text

    class ChatMarkdown(Markdown):
        elements = {**Markdown.elements, "heading_open": LeftHeading}  # noqa: RUF012

    markdown = ChatMarkdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = parser().parse(text)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown


def render_whole(console: Console, text: str) -> Any:
    """As render_block, but the text itself where the window is so narrow that words of a table would be cut
    off."""
    from rich.text import Text

    markdown = render_block(text)
    if "|" not in text:
        return markdown
    shown = "".join(segment.text for line in console.render_lines(markdown, pad=False) for segment in line)
    return Text(text) if shown.count("…") > text.count("…") else markdown


def print_unpadded(console: Console, renderable: Any) -> None:
    """Print without the spaces that rich fills lines up with,
    which are copied along and break when a window shrinks.

    Without the empty lines at either end as well.
    """
    from rich.segment import Segment, Segments

    lines = console.render_lines(renderable, pad=False)
    for line in lines:
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
    while len(lines) > 1 and not lines[0]:
        del lines[0]
    while len(lines) > 1 and not lines[-1]:
        del lines[-1]
    console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]), end="")
