"""What a stop condition on text is: a reader that follows the text and says where it ends, and what may yet end it.

**Which match counts.** The one that is complete first: reading character by character, generation ends as soon as the
text ends in a match. If several end at the same character, the longest counts (it starts earliest). So the result does
not depend on how tokens cut the text or on the order in which the conditions were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class StopMatch(NamedTuple):
    """reason: the stop string or expression that matched. length: of the text that it matched [characters]."""

    reason: str
    length: int


class StopMatcher(Protocol):
    """Immutable to its users, so the n sequences of a request share one: what a sequence has read is its ``state``."""

    @property
    def start(self) -> Any:
        """The state before any text."""

    def scan(self, state: Any, text: str) -> tuple[Any, int, StopMatch | None]:
        """Read text from a state: (new state, characters read, the match that ended the reading or None)."""

    def skip(self, state: Any, text: str) -> Any:
        """Read text from a state without looking for matches; one may still begin in it and end later."""

    def num_held(self, state: Any) -> int:
        """How many of the last characters may yet turn out to begin a match."""


class FirstStop:
    """Several matchers as one StopMatcher; its state is all of theirs."""

    def __init__(self, matchers: Sequence[StopMatcher]) -> None:
        self._matchers = matchers
        self.start: tuple[Any, ...] = tuple(matcher.start for matcher in matchers)

    def scan(self, state: tuple[Any, ...], text: str) -> tuple[tuple[Any, ...], int, StopMatch | None]:
        states, first = [], None
        for matcher, before in zip(self._matchers, state):
            after, num_read, match = matcher.scan(before, text)
            states.append(after)
            if match is not None and (first is None or num_read < len(text) or match.length > first.length):
                first, text = match, text[:num_read]
        return tuple(states), len(text), first

    def skip(self, state: tuple[Any, ...], text: str) -> tuple[Any, ...]:
        return tuple(matcher.skip(before, text) for matcher, before in zip(self._matchers, state))

    def num_held(self, state: tuple[Any, ...]) -> int:
        return max(matcher.num_held(each) for matcher, each in zip(self._matchers, state))
