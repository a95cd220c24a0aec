"""Stop strings: found wherever tokens cut them, in time linear in the text, however long they are.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick 1975). Its state after some text is the
longest suffix of the text that begins a stop string, which is exactly the part a stream must hold back. Which of
several matches counts, ``stop_matcher`` tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minivllm.stop_conditions.stop_matcher import StopMatch


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
