"""One tool call written as a JSON object, read character by character: ``{"name": …, "arguments": {…}}``.

The arguments are passed on as the model writes them, before the object is complete; so they are not checked, and a
model may leave them invalid. Only the object around them is understood.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from minivllm.server.parsers.events import CallArguments, CallEnd, CallStart, Event

ARGUMENT_KEYS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"


class _State(Enum):
    OPENING = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA_OR_END = auto()
    DONE = auto()
    FAILED = auto()


class CallObjectReader:
    """Reads one object and stops behind it.

    A call is announced as soon as its name is known and its arguments begin. ``requires_arguments``: an object with a
    name alone is no call. What was not announced is in ``raw`` and is the caller's to treat as text.
    """

    def __init__(self, *, requires_arguments: bool) -> None:
        self._requires_arguments = requires_arguments
        self._state = _State.OPENING
        self._raw: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self._announced = False
        self._key = ""
        self._token: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_done(self) -> bool:
        return self._state in (_State.DONE, _State.FAILED)

    @property
    def is_call(self) -> bool:
        return self._announced

    @property
    def raw(self) -> str:
        """Everything read so far; empty once the call was announced."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """(characters taken, events). Takes all of ``text`` unless the object ends or breaks in it."""
        events: list[Event] = []
        taken = 0
        for char in text:
            if self.is_done or not self._step(char):
                break
            taken += 1
            if not self._announced:
                self._raw.append(char)
                self._announce(events)
        if self._announced and self._arguments:
            events.append(CallArguments("".join(self._arguments)))
            self._arguments = []
        if self.is_done and self._announced:
            events.append(CallEnd())
        return taken, events

    def finish(self) -> list[Event]:
        """The text ended inside the object; pieces of an announced call's arguments stay as they are."""
        if self._announced and self._state is _State.IN_VALUE and self._key in ARGUMENT_KEYS and self._token:
            return [CallArguments("".join(self._token))]
        return []

    def _announce(self, events: list[Event]) -> None:
        ends = self._state is _State.DONE
        if self._name is None or not (self._has_arguments or (ends and not self._requires_arguments)):
            return
        self._announced, self._raw = True, []
        if not self._has_arguments:
            self._arguments = ["{}"]
        events.append(CallStart(self._name))

    def _step(self, char: str) -> bool:
        """Read one character; False if it does not belong to the object."""
        state = self._state
        if state is _State.IN_VALUE:
            return self._in_value(char)
        if state is _State.KEY:
            self._read_key(char)
            return True
        if char in WHITESPACE:
            return True
        if state is _State.OPENING and char == "{":
            self._state = _State.KEY_OR_END
        elif state is _State.KEY_OR_END and char == '"':
            self._state, self._token = _State.KEY, [char]
        elif state in (_State.KEY_OR_END, _State.COMMA_OR_END) and char == "}":
            self._state = _State.DONE
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.COMMA_OR_END and char == ",":
            self._state = _State.KEY_OR_END
        elif state is _State.VALUE and char not in ",:}]":
            self._begin_value(char)
        else:
            self._state = _State.FAILED
            return False
        return True

    def _read_key(self, char: str) -> None:
        self._token.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._key, self._state = _decoded("".join(self._token)) or "", _State.COLON

    def _begin_value(self, char: str) -> None:
        self._state = _State.IN_VALUE
        self._token = []
        self._depth, self._in_string, self._escaped = 0, False, False
        # A second "arguments" is not part of the first one.
        if self._key in ARGUMENT_KEYS and self._has_arguments:
            self._key = ""
        self._in_value(char)
        if self._key in ARGUMENT_KEYS and char != '"':
            self._has_arguments = True

    def _in_value(self, char: str) -> bool:
        """One character of a value. Containers and strings end with their last character, numbers before the next."""
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self._end_value_if_outermost()
            return True
        if self._depth == 0 and char in ",}" + WHITESPACE:
            self._end_value()
            return self._step(char)
        if self._depth == 0 and char in "]:":
            self._state = _State.FAILED
            return False
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._end_value_if_outermost()
        return True

    def _keep(self, char: str) -> None:
        """Arguments stream; a string that holds them, and the name, are decoded once complete."""
        if self._key in ARGUMENT_KEYS and not (self._token and self._token[0] == '"') and (self._depth or char != '"'):
            self._arguments.append(char)
        elif self._key == "name" or self._key in ARGUMENT_KEYS:
            self._token.append(char)

    def _end_value_if_outermost(self) -> None:
        if self._depth == 0:
            self._end_value()

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END
        text = _decoded("".join(self._token)) if self._token else None
        if text is None:
            return
        if self._key == "name" and self._name is None:
            self._name = text
        elif self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            self._arguments.append(text)


def _decoded(token: str) -> str | None:
    """The text of a JSON string; None if it is not one."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
