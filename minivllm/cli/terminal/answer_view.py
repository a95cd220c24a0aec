"""Answers on a screen: as they are, or as Markdown that can be read while it is written."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minivllm.cli.terminal.live_text import LiveText, window_size
from minivllm.cli.terminal.markdown_blocks import Block, BlockSplitter, CodeLine, parser
from minivllm.cli.terminal.terminal_text import ControlCharacterFilter, dim, styles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding

CODE_INDENT = "  "


class AnswerView(Protocol):
    """Where an answer goes as it comes. feed: the next piece. finish: the answer is over, or was interrupted."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


def answer_view(stream: TextIO, raw: bool) -> AnswerView:
    """Markdown on a terminal that understands cursor movements; otherwise, and if ``raw``, the text itself."""
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

    What is not finished shows as it is written, wrapped between words. When a block is finished, its text is erased and
    the rendered block is printed once in its place, code line by line. A terminal cannot take back what has scrolled
    away, so a block that is taller than the window stays as it was written. Reasoning between ``<think>`` and
    ``</think>`` is printed dim as it comes.
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
                console, render_whole(console, piece.text) if isinstance(piece, Block) else self._highlighted(piece)
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
    """As render_block, but the text itself where the window is so narrow that words of a table would be cut off."""
    from rich.text import Text

    markdown = render_block(text)
    if "|" not in text:
        return markdown
    shown = "".join(segment.text for line in console.render_lines(markdown, pad=False) for segment in line)
    return Text(text) if shown.count("…") > text.count("…") else markdown


def print_unpadded(console: Console, renderable: Any) -> None:
    """Print without the spaces that rich fills lines up with, which are copied along and break when a window shrinks.

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
