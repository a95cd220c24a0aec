"""The expressions of JSON schemas, written in ECMA-262's notation,
in the notation of the grammar compiler (Rust's).

The two, and Python's, agree on most of it. Syntax that only one of them knows is refused. Syntax that they
read differently is written out, so that a string that matches here matches in both.
"""

import re

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_CLOCK_DURATION = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = (
    f"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK_DURATION})?|{_CLOCK_DURATION}"
    "|[0-9]+W)"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "(?:{full}|{shortened})".format(
    full=f"(?:{_GROUP}:){{7}}{_GROUP}",
    shortened="|".join(
        f"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
        if before < 7
        else f"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::"
        for before in range(1, 8)
    ),
)
# Two hyphens at the third place would say that a label is encoded.
_LETTER, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_LONG_LABEL = f"{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,57}}{_LETTER}"
_LABEL = f"{_LETTER}(?:{_INNER}{{0,2}}{_LETTER}|{_LONG_LABEL})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_WORD = r"[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_WORD}(?:\.{_WORD}){{0,7}}@{_HOSTNAME}"
_PATH_CHARACTER = r"(?:[0-9A-Za-z._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][0-9A-Za-z+.-]*:(?://(?:{_HOSTNAME}|{_IPV4}|\[{_IPV6}\])(?::[0-9]{{1,5}})?(?:/{_PATH_CHARACTER}*)*"
    rf"|/?{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hostname": _HOSTNAME,
    "email": _EMAIL,
    "uri": _URI,
}
"""Narrower than the formats where an expression cannot say more: no leap seconds and no year 0; at most nine
digits of a second; capital T and Z; host names of up to four labels, none of them encoded; mail addresses
without quotes, and not at numbers; URIs without user names; IPv6 without dots."""


CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes as \\uXXXX only, so that structured outputs cannot write them."""

_BLANKS = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ECMA = {"w": "0-9A-Za-z_", "d": "0-9", "s": _BLANKS + r"\ufeff"}
_SMALLEST = {"w": "0-9A-Za-z_", "d": "0-9", "s": _BLANKS}
_LARGEST = {
    "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\u200c\u200d",
    "d": r"\p{Decimal_Number}",
    "s": _BLANKS + r"\x1c-\x1f\u0085\ufeff",
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{([0-9]{1,9})(,([0-9]{1,9})?)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")


def to_rust(pattern: str, *, exact: bool = False) -> str:
    """The expression in Rust's notation. Raises ValueError with a sentence about what it cannot say.

    ECMA-262 and Python differ in what ``\\d``, ``\\w``, ``\\s`` and their opposites mean beyond ASCII: a
    string has to match in both. exact: as ECMA-262 has it, for names of properties, which also must not match
    by mistake.
    """
    return _Reader(pattern, exact).read()


class _Reader:
    def __init__(self, pattern: str, exact: bool) -> None:
        self._text = pattern
        self._place = 0
        self._exact = exact

    def read(self) -> str:
        written: list[str] = []
        depth, may_repeat = 0, False
        while self._place < len(self._text):
            character = self._take()
            count = _COUNT.match(self._text, self._place - 1) if character == "{" else None
            if character in "*+?" or count:
                if not may_repeat:
                    raise ValueError(f"{self._text!r} repeats nothing, or something that is repeated already")
                written.append(count[0] if count else character)
                self._place = count.end() if count else self._place
                if self._peek() == "?":  # as few as possible: the same strings match
                    self._take()
                may_repeat = False
                continue
            may_repeat = character not in "(|^$"
            if character == "(":
                depth += 1
                self._open_group()
                written.append("(?:")
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise ValueError(f"{self._text!r} has a closing parenthesis too many")
                written.append(")")
            elif character in "|^$":
                written.append(character)
            elif character == ".":
                written.append(_writable(r"[^\n\r\u2028\u2029]"))
            elif character == "[":
                written.append(_writable(self._class()))
            elif character == "\\":
                escape = self._escape(negated=False)
                written.append(_writable(escape) if isinstance(escape, str) else self._character(escape))
            else:
                written.append(self._character(ord(character)))
        if depth:
            raise ValueError(f"{self._text!r} has an unclosed group")
        return "".join(written)

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self) -> str:
        if self._place >= len(self._text):
            raise ValueError(f"{self._text!r} ends too early")
        self._place += 1
        return self._text[self._place - 1]

    def _character(self, code: int) -> str:
        if CONTROLS.match(chr(code)):
            raise ValueError(f"{self._text!r} asks for a control character, which cannot be written")
        return _literal(code)

    def _open_group(self) -> None:
        if self._peek() != "?":
            return
        kind = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)").match(self._text, self._place)
        if kind is None:
            raise ValueError(f"{self._text!r} uses look-around or flags, which are not supported")
        self._place = kind.end()

    def _escape(self, *, negated: bool) -> int | str:
        """A code point, or a class in brackets, after a backslash. negated: inside of ``[^…]``."""
        character = self._take()
        if character in "dDwWsS":
            is_complement = character.isupper()
            sets = _ECMA if self._exact else _SMALLEST if is_complement == negated else _LARGEST
            return f"[{'^' if is_complement else ''}{sets[character.lower()]}]"
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not self._peek().isdigit():
            return 0
        if character == "c" and re.match("[A-Za-z]", self._peek()):
            return ord(self._take()) % 32
        start = self._place - 1
        if character in "xu" and (code := _HEX.match(self._text, start)):
            self._place = code.end()
            return self._joined(int(code[1] or code[2] or code[3], 16))
        if character in "pP" and (name := _PROPERTY.match(self._text, start)):
            self._place = name.end()
            return f"[\\{name[0]}]"
        if character.isalnum() and character.isascii():
            raise ValueError(f"{self._text!r} uses \\{character}, which is not supported")
        return ord(character)

    def _joined(self, code: int) -> int:
        """Two halves of a surrogate pair are one character."""
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._place)
        if 0xD800 <= code < 0xDC00 and low:
            self._place = low.end()
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise ValueError(f"{self._text!r} names the code point {code:x}, which is no character")
        return code

    def _class(self) -> str:
        negated = self._peek() == "^"
        if negated:
            self._take()
        if self._peek() == "]":
            raise ValueError(
                f"{self._text!r} has an empty class, which not everybody reads alike: write \\] for ]"
            )
        parts: list[str] = []
        while (character := self._take()) != "]":
            first = self._member(character, negated)
            is_range = self._peek() == "-" and self._text[self._place + 1 : self._place + 2] not in ("]", "")
            if not is_range:
                parts.append(first if isinstance(first, str) else _literal(first))
                continue
            self._take()
            last = self._member(self._take(), negated)
            if isinstance(first, str) or isinstance(last, str) or first > last:
                raise ValueError(f"{self._text!r} has a range of characters without a beginning or an end")
            parts.append(f"{_literal(first)}-{_literal(last)}")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _member(self, character: str, negated: bool) -> int | str:
        if character != "\\":
            return ord(character)
        if self._peek() == "b":
            self._take()
            return 8
        return self._escape(negated=negated)


def _writable(characters: str) -> str:
    return rf"[{characters}&&[^\x00-\x07\x0b\x0e-\x1f\x7f]]"


def _literal(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"
