"""Text on a terminal while it is being written:
wrapped between words, and taken back as long as that is possible."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TextIO

TAB = "    "
_ERASE_ROW = "\r\x1b[2K"
_ERASE_BELOW = "\x1b[J"
_JOINER, _EMOJI_STYLE = "\u200d", "\ufe0f"
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
_OUT_OF_REACH = 10**9
"""Height of a line whose rows cannot be counted any more [rows]."""


def window_size(stream: TextIO) -> os.terminal_size:
    """Columns and rows of the terminal of ``stream`` [cells]; 80 x 24 if they are unknown."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def wrap(line: str, columns: int) -> list[str]:
    """``line`` in rows of at most ``columns`` cells;
    joined they are the line, so a row may end in spaces too many.

    A row ends between words, or beside a wide character, and inside a word only if the word is longer than a
    row. Emoji that are joined from several count as all of them, which is what a terminal that cannot join
    them draws.
    """
    rows: list[str] = []
    widths = _widths(line)
    start = unbreakable = may_end = width = 0
    for index, (character, cells) in enumerate(zip(line, widths)):
        last = line[index - 1 : index]
        if cells and last != _JOINER and character != _EMOJI_STYLE and character not in _SKIN_TONES:
            if last == " " or cells == 2 or widths[unbreakable] == 2:
                may_end = index
            unbreakable = index
        if character != " " and width + cells > columns and index > start:
            end = may_end if may_end > start else max(unbreakable, start + 1)
            rows.append(line[start:end])
            start, width = end, sum(widths[end:index])
        width += cells
    rows.append(line[start:])
    return rows


def _widths(text: str) -> list[int]:
    """Of each character [cells]; what terminals disagree about counts as the most that one of them takes."""
    from rich.cells import get_character_cell_size

    widths: list[int] = []
    for character in text:
        is_widening = character == _EMOJI_STYLE and widths and widths[-1] == 1
        widths.append(1 if is_widening else get_character_cell_size(character))
    return widths


class LiveText:
    """The unfinished end of what is on the screen.

    ``write`` prints text as it comes, wrapped by this class, so that the number of rows it takes is known.
    ``take_back`` erases it, unless it has reached beyond the window, or the window has another width by now:
    rows that scrolled away or were laid out anew by the terminal cannot be erased, and would stand there
    twice.

    emit: prints a piece. window: see window_size. style: what is done to each piece before it is printed.
    """

    def __init__(
        self,
        emit: Callable[[str], object],
        window: Callable[[], os.terminal_size],
        style: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._emit = emit
        self._window = window
        self._style = style
        self._columns = 0
        self._restart()

    def _restart(self) -> None:
        self._heights = [1]  # rows of each line of the text so far
        self._tail = ""  # what the last row was made of
        self._shown = ""  # what of it is on the screen
        self._is_resized = False

    @property
    def is_fresh(self) -> bool:
        """True while nothing is on the screen that could be taken back."""
        return self._heights == [1] and not self._shown

    def write(self, text: str) -> None:
        columns = self._room()
        if columns != self._columns:
            self._is_resized |= not self.is_fresh
            self._columns = columns
        text = text.replace("\t", TAB)
        if self._is_resized:
            text = self._leave_row(text)
        for number, part in enumerate(text.split("\n")):
            if number:
                self._emit("\n")
                self._heights.append(1)
                self._tail = self._shown = ""
            if part:
                self._extend(part)

    def _room(self) -> int:
        """Columns that are written to; what stands in the last one may or may not wrap."""
        return max(2, self._window().columns - 1)

    def _leave_row(self, text: str) -> str:
        """Finish the word at the end of a row whose place is not known any more;
        what comes after it, on a new row."""
        self._heights = [_OUT_OF_REACH] * len(self._heights)
        is_word = self._tail != "" and not self._tail.endswith(" ")
        word = re.split(r"[ \n]", text, maxsplit=1)[0] if is_word else ""
        self._emit(self._style(word) if word else "")
        text = text[len(word) :]
        if text:
            if self._tail and not text.startswith("\n"):
                self._emit("\n")
            self._is_resized = False
            self._tail = self._shown = ""
        return text if text.startswith("\n") else text.lstrip(" ")

    def _extend(self, part: str) -> None:
        rows = wrap(self._tail + part, self._columns)
        last = rows[-1]
        # Spaces beyond the last column show with the next word, which goes to the next row.
        shown = [row.rstrip(" ") for row in rows]
        if sum(_widths(last)) <= self._columns:
            shown[-1] = last
        if shown[0].startswith(self._shown):
            self._write_styled(shown[0][len(self._shown) :])
        else:
            self._emit(_ERASE_ROW)
            self._write_styled(shown[0])
        for row in shown[1:]:
            self._emit("\n")
            self._write_styled(row)
        self._heights[-1] += len(rows) - 1
        self._tail = rows[-1]
        self._shown = shown[-1]

    def _write_styled(self, text: str) -> None:
        if text:
            self._emit(self._style(text))

    def leave_gap(self) -> None:
        """An empty row above what comes; it belongs to it."""
        self._columns = self._room()
        self._emit("\n")
        self._heights[-1] += 1

    def take_back(self) -> bool:
        """Erase all of it; False, and nothing happens, if that is not possible."""
        height = sum(self._heights)
        is_laid_out_anew = self._room() != self._columns and not self.is_fresh
        if is_laid_out_anew or height > self._window().lines:
            return False
        if not self.is_fresh:
            self._emit("\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + _ERASE_BELOW)
        self._restart()
        return True

    def keep(self, num_lines: int) -> None:
        """The first ``num_lines`` lines stay as they are for good; the rest can still be taken back."""
        del self._heights[:num_lines]

    def end(self) -> None:
        """All of it stays, and its last row ends."""
        if self._shown or self._is_resized:
            self._emit("\n")
        self._restart()
