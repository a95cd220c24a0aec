"""Reasoning between ``<think>`` and ``</think>`` (DeepSeek-R1's form, also Qwen3's and SmolLM3's)."""

from enum import Enum, auto

from minivllm.server.parsers.events import Event, Parser, Reasoning, split_at_tag

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ThinkParser:
    """Hands what follows the reasoning to ``inner``. A tag counts only at the very beginning of the answer.

    starts_inside: the prompt already opened the tag, as some chat templates do.
    Newlines next to the tags belong to neither part.
    """

    def __init__(self, inner: Parser, *, starts_inside: bool) -> None:
        self._inner = inner
        self._state = _State.INSIDE if starts_inside else _State.BEFORE
        self._leading_space = ""
        self._buffer = ""
        self._is_fresh = True

    def feed(self, text: str) -> list[Event]:
        if self._state is _State.AFTER:
            return self._rest(text)
        self._buffer += text
        if self._state is _State.BEFORE:
            stripped = self._buffer.lstrip()
            self._leading_space += self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
            if stripped.startswith(OPEN):
                self._state = _State.INSIDE
                self._buffer = stripped[len(OPEN) :]
            elif OPEN.startswith(stripped):
                return []
            else:
                return self._leave(self._leading_space + stripped, strips_newlines=False)
        before, found, self._buffer = split_at_tag(self._buffer, CLOSE)
        events = self._reasoning(before)
        return [*events, *self._leave(self._buffer, strips_newlines=True)] if found else events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.INSIDE:
            events = self._reasoning(self._buffer)
        elif self._state is _State.BEFORE:
            events = self._inner.feed(self._leading_space + self._buffer)
        return [*events, *self._inner.finish()]

    def _reasoning(self, text: str) -> list[Event]:
        text = self._without_first_newlines(text)
        return [Reasoning(text)] if text else []

    def _leave(self, rest: str, *, strips_newlines: bool) -> list[Event]:
        self._state = _State.AFTER
        self._buffer = ""
        self._is_fresh = strips_newlines
        return self._rest(rest)

    def _rest(self, text: str) -> list[Event]:
        text = self._without_first_newlines(text)
        return self._inner.feed(text) if text else []

    def _without_first_newlines(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return text
