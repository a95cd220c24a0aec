"""Text for terminals: model output without control characters, dim notices, numbers for people."""

from __future__ import annotations

import os
from enum import Enum, auto
from typing import TextIO


class _State(Enum):
    TEXT = auto()
    ESCAPE = auto()
    SEQUENCE = auto()
    STRING = auto()


class ControlCharacterFilter:
    """Removes escape sequences and control characters from streamed text; newline and tab stay.

    A model can be talked into printing sequences that move the cursor, set the clipboard or fake a prompt. State is
    kept between pieces, so a sequence that is cut anywhere is removed as a whole. The grammar is ECMA-48's: ESC
    [intermediate] final, CSI … final, and the strings (OSC, DCS, SOS, PM, APC) up to BEL or ST. A string also ends at
    a newline, because an answer must not vanish behind a string that is never closed.
    """

    def __init__(self) -> None:
        self._state = _State.TEXT

    def feed(self, text: str) -> str:
        """The printable part of ``text``, the next piece of the stream."""
        kept: list[str] = []
        for character in text:
            if self._consume(character):
                kept.append(character)
        return "".join(kept)

    def _consume(self, character: str) -> bool:
        """Advance by one character; True if it is to be printed."""
        code = ord(character)
        if character == "\n":
            self._state = _State.TEXT
            return True
        if character == "\x1b":
            self._state = _State.ESCAPE
            return False
        if self._state is _State.STRING:
            if character in "\x07\x9c":
                self._state = _State.TEXT
            return False
        if 0x80 <= code < 0xA0:
            self._state = _after_c1(code)
            return False
        if self._state is _State.ESCAPE:
            return self._consume_escape(code)
        if self._state is _State.SEQUENCE:
            return self._consume_sequence(code)
        return code == 0x09 or (code >= 0x20 and code != 0x7F)

    def _consume_escape(self, code: int) -> bool:
        if 0x40 <= code < 0x60:
            self._state = _after_c1(code + 0x40)
        elif not 0x20 <= code < 0x30:
            self._state = _State.TEXT
            # ESC with a final byte is a sequence of its own; what is no final byte never belonged to one.
            return code > 0x7F
        return False

    def _consume_sequence(self, code: int) -> bool:
        if 0x20 <= code < 0x40:
            return False
        self._state = _State.TEXT
        return code > 0x7F


def _after_c1(code: int) -> _State:
    """The state after C1 control ``code`` (or its two-character form, ESC and ``code`` - 0x40)."""
    if code == 0x9B:
        return _State.SEQUENCE
    if code in (0x90, 0x98, 0x9D, 0x9E, 0x9F):
        return _State.STRING
    return _State.TEXT


def printable(text: str) -> str:
    """``text`` without escape sequences and control characters."""
    return ControlCharacterFilter().feed(text)


def styles(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal that may be given styles (https://no-color.org is respected)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """``text`` dimmed if ``stream`` shows styles."""
    return f"\x1b[2m{text}\x1b[0m" if styles(stream) else text


def counted(count: int, noun: str) -> str:
    """1 token, 1,204 tokens."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_rate(tokens_per_second: float) -> str:
    """A rate with three significant digits at most: 38.1 tok/s, 412 tok/s, 1.9k tok/s."""
    if tokens_per_second >= 1000:
        return f"{tokens_per_second / 1000:.1f}k tok/s"
    return f"{tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f} tok/s"


def format_duration(seconds: float) -> str:
    """84 ms below a second, 1.2 s from there on."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """A size in binary units with one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
