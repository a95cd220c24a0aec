"""The two common ways in which models write tool calls, and the JSON object that both write a call as.

A call's arguments are passed on as the model writes them, before the object is complete; so they are not
checked, and a model may leave them invalid. Only the object around them is understood, character by
character.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from minivllm.server.parsers.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Event,
    split_at_tag,
)

ARGUMENT_KEYS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"


class CallObjectReader:
    """Reads one object and stops after it.

    A call is announced as soon as its name is known and its arguments begin. ``requires_arguments``: an
    object with a name alone is no call. raw: everything read so far; of an object that is no call, it is the
    caller's text.
    """

    def __init__(self, *, requires_arguments: bool) -> None:
        self._requires_arguments = requires_arguments
        self._raw: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self.is_done = False
        self.is_call = False
        self._reading = self._read()
        next(self._reading)

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """(characters taken, events). Takes all of ``text`` unless the object ends or breaks in it."""
        events: list[Event] = []
        taken = 0
        for char in text:
            if self.is_done:
                break
            try:
                self._reading.send(char)
            except StopIteration as end:
                self.is_done = True
                if not end.value:
                    break
            taken += 1
            self._raw.append(char)
            if not self.is_call:
                self._announce(events)
        if self.is_call and self._arguments:
            events.append(CallArguments("".join(self._arguments)))
            self._arguments = []
        if self.is_done and self.is_call:
            events.append(CallEnd())
        return taken, events

    def _announce(self, events: list[Event]) -> None:
        is_complete = self.is_done and not self._requires_arguments
        if self._name is None or not (self._has_arguments or is_complete):
            return
        self.is_call = True
        if not self._has_arguments:
            self._arguments = ["{}"]
        events.append(CallStart(self._name))

    def _read(self) -> Generator[None, str, bool]:
        """Is sent the object's characters;
        True after its last one, False at one that does not belong to it."""
        if (yield from self._next()) != "{":
            return False
        while (char := (yield from self._next())) == '"':
            key = _decoded((yield from self._string())) or ""
            if (yield from self._next()) != ":":
                return False
            char = yield from self._value(key, (yield from self._next()))
            if char != ",":
                break
        return char == "}"

    def _next(self) -> Generator[None, str, str]:
        """The next character that is not whitespace."""
        while (char := (yield)) in WHITESPACE:
            pass
        return char

    def _string(self) -> Generator[None, str, str]:
        """The string whose first quote was read, with its quotes."""
        token, is_escaped = ['"'], False
        while True:
            token.append((yield))
            if token[-1] == '"' and not is_escaped:
                return "".join(token)
            is_escaped = token[-1] == "\\" and not is_escaped

    def _value(self, key: str, char: str) -> Generator[None, str, str]:
        """Read the value that begins with ``char``. Returns the next character that is not whitespace.

        Arguments stream; a string that holds them, and the name, are decoded once complete.
        """
        # A second "arguments" is not part of the first one.
        is_arguments = key in ARGUMENT_KEYS and not self._has_arguments
        if char == '"':
            text = _decoded((yield from self._string()))
            if key == "name" and self._name is None:
                self._name = text
            elif is_arguments and text is not None:
                self._has_arguments = True
                self._arguments.append(text)
            return (yield from self._next())
        if char in ",:}]":
            return ""
        self._has_arguments |= is_arguments
        depth, is_quoted, is_escaped = 0, False, False
        while True:
            if is_arguments:
                self._arguments.append(char)
            if is_quoted:
                is_quoted = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            elif char == '"':
                is_quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    return (yield from self._next())
            char = yield
            if depth == 0 and not is_quoted and char in ",:}]" + WHITESPACE:
                return (yield from self._next()) if char in WHITESPACE else char


def _decoded(token: str) -> str | None:
    """The text of a JSON string; None if it is not one."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallForm:
    """How a call is written where a grammar forces one:
    ``opening``, an object of name and arguments, ``closing``.

    arguments_key: the arguments' name in that object. separator: stands between two calls.
    """

    opening: str
    arguments_key: str
    closing: str
    separator: str

    def begin(self, name: str) -> str:
        """By what a call of ``name`` is told from an answer:
        its opening, or else all before its arguments."""
        return self.opening.strip() or f'{{"name": "{name}", "{self.arguments_key}":'


class _State(Enum):
    BEGINNING = auto()
    TEXT = auto()
    OBJECT = auto()
    BEHIND_OBJECT = auto()


class CallParser(ABC):
    """Rules of both forms: whitespace around calls is dropped, a broken call is text, objects may repeat."""

    form: ClassVar[CallForm]

    def __init__(self, state: _State, *, requires_arguments: bool) -> None:
        self._state = state
        self._requires_arguments = requires_arguments
        self._buffer = ""
        self._spaces: list[str] = []
        self._has_calls = False
        self._reader = CallObjectReader(requires_arguments=requires_arguments)
        self._opening = ""

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.OBJECT:
            if self._reader.is_call:
                return [CallBroken(self._opening + self._reader.raw)]
            self._content(self._opening + self._reader.raw, events)
        self._content(self._buffer, events)
        if self._spaces and not self._has_calls:
            events.append(Content("".join(self._spaces)))
        return events

    @abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """Take something from the buffer; False if it takes more text to go on."""

    def _begin_object(self, opening: str) -> None:
        """``opening``: what stands before the object and turns into text if the object is no call."""
        self._state = _State.OBJECT
        self._opening = opening
        self._reader = CallObjectReader(requires_arguments=self._requires_arguments)

    def _read_object(self, events: list[Event]) -> None:
        taken, new_events = self._reader.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        if self._reader.is_call:
            self._has_calls = True
            self._spaces = []
        events += new_events
        if not self._reader.is_done:
            return
        self._state = _State.BEHIND_OBJECT if self._reader.is_call else _State.TEXT
        if not self._reader.is_call:
            self._content(self._opening + self._reader.raw, events)

    def _content(self, text: str, events: list[Event]) -> None:
        """Emit text; trailing whitespace waits for what follows, because before a call it is none."""
        body = text.rstrip()
        if body:
            events.append(Content("".join([*self._spaces, body])))
            self._spaces = []
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])


class HermesParser(CallParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes 2 Pro, Qwen and SmolLM write it."""

    form = CallForm(f"{HERMES_OPEN}\n", "arguments", f"\n{HERMES_CLOSE}", "\n")

    def __init__(self) -> None:
        super().__init__(_State.TEXT, requires_arguments=False)

    def _advance(self, events: list[Event]) -> bool:
        if self._state is _State.TEXT:
            before, found, self._buffer = split_at_tag(self._buffer, HERMES_OPEN)
            self._content(before, events)
            if found:
                self._begin_object(HERMES_OPEN)
            return found
        if self._state is _State.OBJECT:
            self._read_object(events)
            return True
        self._buffer = self._buffer.lstrip(WHITESPACE)
        if self._buffer.startswith(HERMES_CLOSE):
            self._state, self._buffer = _State.TEXT, self._buffer[len(HERMES_CLOSE) :]
        elif HERMES_CLOSE.startswith(self._buffer):
            return False
        elif self._buffer[0] == "{":
            self._begin_object("")
        else:
            self._state = _State.TEXT
        return True

    def finish(self) -> list[Event]:
        if self._state is _State.BEHIND_OBJECT:
            self._buffer = ""  # half a closing tag
        return super().finish()


class LlamaParser(CallParser):
    """``{"name": …, "parameters": {…}}``, several separated by ``;``, as Llama 3 writes it.

    The answer must begin with it; ``<|python_tag|>`` may stand before it (it is a special token,
    mostly left out).
    """

    form = CallForm("", "parameters", "", "; ")

    def __init__(self) -> None:
        super().__init__(_State.BEGINNING, requires_arguments=True)
        self._has_tag = False

    def _advance(self, events: list[Event]) -> bool:
        if self._state is _State.TEXT:
            self._content(self._buffer, events)
            self._buffer = ""
            return True
        if self._state is _State.OBJECT:
            self._read_object(events)
            return True
        if self._state is _State.BEHIND_OBJECT:
            self._buffer = self._buffer.lstrip(WHITESPACE + ";,")
            if self._buffer.startswith("{"):
                self._begin_object("")
            elif self._buffer:
                self._state = _State.TEXT
            return True
        return self._begin(events)

    def _begin(self, events: list[Event]) -> bool:
        """Before the first object: whitespace and the tag, which turn out to be text if no object follows."""
        rest = self._buffer.lstrip(WHITESPACE)
        self._opening += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not self._has_tag and rest.startswith(LLAMA_TAG):
            self._has_tag = True
            self._opening, self._buffer = self._opening + LLAMA_TAG, rest[len(LLAMA_TAG) :]
        elif rest.startswith("{"):
            self._begin_object(self._opening)
        elif self._has_tag or not LLAMA_TAG.startswith(rest):
            self._content(self._opening, events)
            self._state = _State.TEXT
        else:
            return False
        return True

    def finish(self) -> list[Event]:
        if self._state is _State.BEGINNING:
            self._buffer = self._opening + self._buffer
        return super().finish()
