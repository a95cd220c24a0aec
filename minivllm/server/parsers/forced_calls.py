"""Answers that a grammar forced into a form: nothing but the arguments of a call, or either calls or an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.server.parsers.call_object import WHITESPACE
from minivllm.server.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Parser, PlainText


class NamedCallParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        begin: list[Event] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*begin, CallArguments(text)]

    def finish(self) -> list[Event]:
        return [CallEnd()] if self._has_begun else []


class CallsOrAnswer:
    """The whole text is calls, if it begins like one, or else an answer in which nothing is a call.

    begins: how calls begin; whitespace outside of strings makes no difference.
    """

    def __init__(self, make_calls_parser: Callable[[], Parser], begins: Sequence[str]) -> None:
        self._make_calls_parser = make_calls_parser
        self._begins = [_Compact(begin).text for begin in begins]
        self._seen = _Compact()
        self._buffer = ""
        self._parser: Parser | None = None

    def feed(self, text: str) -> list[Event]:
        if self._parser is None:
            self._buffer += text
            self._seen.add(text)
            if any(self._seen.text.startswith(begin) for begin in self._begins):
                self._parser = self._make_calls_parser()
            elif not any(begin.startswith(self._seen.text) for begin in self._begins):
                self._parser = PlainText()
            else:
                return []
            text, self._buffer = self._buffer, ""
        return self._parser.feed(text)

    def finish(self) -> list[Event]:
        if self._parser is not None:
            return self._parser.finish()
        return [Content(self._buffer)] if self._buffer else []


class _Compact:
    """JSON as it grows, without the whitespace outside of its strings."""

    def __init__(self, text: str = "") -> None:
        self.text = ""
        self._in_string = False
        self.add(text)

    def add(self, text: str) -> None:
        for char in text:
            if char == '"':  # no call begins with a string that has an escaped one
                self._in_string = not self._in_string
            if self._in_string or char not in WHITESPACE:
                self.text += char
