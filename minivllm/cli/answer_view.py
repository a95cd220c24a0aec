"""Answers on a screen: as they are, or as Markdown whose finished blocks are rendered once and never touched again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minivllm.cli.markdown_blocks import Block, BlockSplitter, CodeLine, parser
from minivllm.cli.terminal_text import ControlCharacterFilter, dim, styles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CODE_INDENT = "  "
_ERASE_LINE = "\r\x1b[2K"
# Without wrapping, a character that is wider than assumed cannot push the line onto a second row.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


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

    A block that grew under the reader's eyes would have to be drawn again and again, and once it is taller than the
    window a terminal cannot take lines back. So a block is rendered when it is finished, code line by line, and what
    is still open shows as one dim line, its last words, that is erased before anything is printed. Reasoning between
    ``<think>`` and ``</think>`` is printed dim as it comes.
    """

    def __init__(self, stream: TextIO) -> None:
        from minivllm.server.parsers.events import PlainText
        from minivllm.server.parsers.reasoning import ThinkParser

        self._stream = stream
        self._styled = styles(stream)
        self._clean = ControlCharacterFilter()
        self._thoughts = ThinkParser(PlainText(), starts_inside=False)
        self._splitter = BlockSplitter()
        self._code: list[str] = []
        self._has_preview = False
        self._is_thinking = False
        self._is_empty = True

    def feed(self, text: str) -> None:
        self._show(self._thoughts.feed(self._clean.feed(text)))
        if not self._is_thinking:
            self._preview()
        self._stream.flush()

    def finish(self) -> None:
        self._show(self._thoughts.finish())
        self._leave_thoughts()
        self._print(self._splitter.finish())
        self._erase_preview()
        self._stream.flush()

    def _show(self, events: list[Any]) -> None:
        from minivllm.server.parsers.events import Content, Reasoning

        for event in events:
            if isinstance(event, Reasoning):
                if not self._is_thinking and not self._styled:
                    self._stream.write("(thinking)\n")
                self._is_thinking = True
                self._stream.write(dim(event.text, self._stream))
            elif isinstance(event, Content):
                self._leave_thoughts()
                self._print(self._splitter.feed(event.text))

    def _leave_thoughts(self) -> None:
        if self._is_thinking:
            self._stream.write("\n")
            self._is_thinking, self._is_empty = False, False

    def _print(self, pieces: list[Block | CodeLine]) -> None:
        if not pieces:
            return
        self._erase_preview()
        for piece in pieces:
            is_spaced = piece.is_spaced if isinstance(piece, Block) else piece.number == 0
            if is_spaced and not self._is_empty:
                self._stream.write("\n")
            self._is_empty = False
            # A new one each time: the window may have another width by now.
            print_unpadded(
                self._console(), render_block(piece.text) if isinstance(piece, Block) else self._highlighted(piece)
            )

    def _console(self) -> Console:
        from rich.console import Console

        return Console(
            file=self._stream,
            force_terminal=True,
            color_system="auto" if self._styled else None,
            width=self._columns(),
            highlight=False,
        )

    def _columns(self) -> int:
        """Of the window [cells]."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _highlighted(self, line: CodeLine) -> Text:
        """The line as it looks at the end of the code so far: colours depend on what is above."""
        from rich.syntax import Syntax

        if line.number == 0:
            self._code = []
        self._code.append(line.text.expandtabs(4))
        syntax = Syntax("", line.language or "text", theme="ansi_dark", background_color="default")
        text = syntax.highlight("\n".join(self._code)).split("\n", allow_blank=True)[line.number]
        text.rstrip()
        return text.__class__(CODE_INDENT).append_text(text)

    def _preview(self) -> None:
        """Show the end of what is not finished yet, on one line."""
        from rich.cells import cell_len

        last = self._splitter.pending.rstrip("\n").rpartition("\n")[2].expandtabs(4)
        room = self._columns() - 4
        if not last.strip() or room < 8:
            return
        if cell_len(last) > room:
            last = "…" + _last_cells(last, room - 1)
        self._stream.write(_ERASE_LINE + _NO_WRAP + dim(last, self._stream) + _WRAP)
        self._has_preview = True

    def _erase_preview(self) -> None:
        if self._has_preview:
            self._stream.write(_ERASE_LINE)
            self._has_preview = False


def _last_cells(text: str, room: int) -> str:
    """The end of ``text`` that takes at most ``room`` cells."""
    from rich.cells import cell_len

    start = len(text)
    while start > 0 and (width := cell_len(text[start - 1])) <= room:
        start, room = start - 1, room - width
    return text[start:]


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
