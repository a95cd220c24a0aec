"""The pieces that a model's text is taken apart into.
However a text is cut into deltas, the pieces add up the same."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model thinking aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the current call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The current call is complete."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The text is over inside the current call. text: the call as the model wrote it."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments | CallEnd | CallBroken


class Parser(Protocol):
    """Takes text as it comes; every method returns what has become certain."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text is over: release everything held back. To be called once, last."""
        ...


class PlainText:
    """Everything is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def split_at_tag(text: str, tag: str) -> tuple[str, bool, str]:
    """(text before the tag, whether the tag is there, text after it or text that may still become the tag).

    The text that is held back is shorter than the tag, so scanning a text in pieces takes linear time.
    """
    position = text.find(tag)
    if position >= 0:
        return text[:position], True, text[position + len(tag) :]
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return text[: len(text) - length], False, text[len(text) - length :]
    return text, False, ""
