"""Answers that a grammar forced to be tool calls: nothing but arguments, or a JSON list of calls."""

from __future__ import annotations

from minivllm.server.parsers.call_object import WHITESPACE, CallObjectReader
from minivllm.server.parsers.events import CallArguments, CallEnd, CallStart, Event


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


class CallListParser:
    """``[{"name": …, "parameters": {…}}, …]``."""

    def __init__(self) -> None:
        self._reader: CallObjectReader | None = None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._reader is None:
                text = text.lstrip(WHITESPACE + "[],")
                if not text:
                    break
                self._reader = CallObjectReader(requires_arguments=False)
            taken, new_events = self._reader.feed(text)
            events += new_events
            # What is no object cannot come from the grammar; skipping it keeps the loop moving all the same.
            text = text[taken if taken or self._reader.is_call else 1 :]
            if self._reader.is_done:
                self._reader = None
        return events

    def finish(self) -> list[Event]:
        return [] if self._reader is None else self._reader.finish()
