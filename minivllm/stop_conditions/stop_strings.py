"""Stop strings: found wherever tokens cut them, in time linear in the text, however long they are.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick 1975). Its state after some
text is the longest suffix of the text that begins a stop string, which is exactly the part a stream must hold
back.

**Which match counts.** The one that is complete first: reading character by character, generation ends as
soon as the text ends in a match. If several end at the same character, the longest counts (it starts
earliest). So the result does not depend on how tokens cut the text or on the order in which the conditions
were given.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class StopMatch(NamedTuple):
    """reason: the stop string or expression that matched.
    length: of the text that it matched [characters]."""

    reason: str
    length: int


class StopMatcher(Protocol):
    """Immutable to its users, so the n sequences of a request share one:
    what a sequence has read is its ``state``."""

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


class StopAutomaton:
    """Implements StopMatcher. States are ints."""

    start = 0

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self._children)
                    self._children.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = self._children[state][char]
            self._match[state] = stop

        # Breadth first, so the shorter suffix that a state falls back to is finished before the state itself.
        self._fallback = [0] * len(depth)
        self._num_held = [0] * len(depth)
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            if self._match[state] is None:
                self._match[state] = self._match[fallback]
            # A complete stop string that starts no longer one can only matter through its suffixes.
            self._num_held[state] = depth[state] if self._children[state] else self._num_held[fallback]
            for char, child in self._children[state].items():
                self._fallback[child] = self._step(fallback, char)
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while char not in self._children[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._children[state][char]

    def scan(self, state: int, text: str) -> tuple[int, int, StopMatch | None]:
        if state == 0 and self._children[0].keys().isdisjoint(text):
            return 0, len(text), None
        for position, char in enumerate(text):
            state = self._step(state, char)
            stop = self._match[state]
            if stop is not None:
                return state, position + 1, StopMatch(stop, len(stop))
        return state, len(text), None

    def skip(self, state: int, text: str) -> int:
        for char in text:
            state = self._step(state, char)
        return state

    def num_held(self, state: int) -> int:
        return self._num_held[state]
