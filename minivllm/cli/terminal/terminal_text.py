"""Text for terminals: model output without control characters, dim notices, numbers for people."""

from __future__ import annotations

import os
import re
from typing import TextIO

_STRING, _CSI = r"(?:\x1b[P\]X^_]|[\x90\x98\x9d-\x9f])[^\x07\x9c\x1b\n]*", r"(?:\x1b\[|\x9b)[ -?]*"
_UNPRINTABLE = re.compile(
    rf"{_STRING}(?:[\x07\x9c]|(?=[\x1b\n]))|{_CSI}(?:[@-~]|(?=[^ -~]))"
    r"|\x1b(?:[ -/]+(?:[0-~]|(?=[^ -~]))|[0-OQ-WYZ\\`-~]|(?=[^ -~]))"
    rf"|(?P<cut>(?:{_STRING}|{_CSI}|\x1b[ -/]*)\Z)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""ECMA-48's sequences: the strings (OSC, DCS, SOS, PM, APC) up to BEL or ST, CSI … final, ESC [intermediate]
final; one that the end of the text cuts; and control characters by themselves."""


class ControlCharacterFilter:
    """Removes escape sequences and control characters from streamed text; newline and tab stay.

    A model can be talked into printing sequences that move the cursor, set the clipboard or fake a prompt. An
    incomplete sequence is kept until the next piece, so a sequence that is cut anywhere is removed as a
    whole. A string also ends at a newline, because an answer must not vanish in a string that is never
    closed.
    """

    def __init__(self) -> None:
        self._begun = ""

    def feed(self, text: str) -> str:
        """The printable part of ``text``, the next piece of the stream."""
        text, self._begun = self._begun + text, ""
        return _UNPRINTABLE.sub(self._remove, text)

    def _remove(self, found: re.Match[str]) -> str:
        self._begun = found["cut"] or ""
        return ""


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
