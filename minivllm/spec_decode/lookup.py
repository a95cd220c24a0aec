"""Drafters without a model: what followed the last tokens when they stood somewhere before is likely to
follow again.

Free of cost and strong where answers repeat their prompt: editing, extraction, code repair. Prompt lookup
looks at the request's own tokens (prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023). Suffix
drafting finds matches of any length, also in what earlier requests were answered (SuffixDecoding, Oliaro et
al. 2024): a suffix automaton (Blumer et al. 1985) holds all substrings of a text in at most two states per
token and is extended token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.spec_decode.drafter import Drafter, DraftTask

LOOKBACK = 32
"""Tokens that are looked up in earlier outputs; a longer match says no more."""
MIN_MATCH = 2
"""A match of a single token says little."""


def longest_suffix_match(token_ids: np.ndarray, min_length: int, max_length: int) -> int | None:
    """The place after the longest earlier occurrence of a suffix of token_ids [n].

    The suffix has min_length to max_length tokens; among occurrences of the longest one the latest counts. An
    occurrence may overlap the suffix, but not be it. Returns an index from 1 to n - 1, or None.
    """
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])
    length = 1
    while len(ends) > 0 and length < max_length:
        longer = ends[ends >= length]  # with room for one more token in front
        longer = longer[token_ids[longer - length] == token_ids[-1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if len(ends) > 0 and length >= min_length else None


def repeat(token_ids: list[int], length: int) -> list[int]:
    """The first ``length`` of token_ids, from the start again when they run out:
    what goes on periodically, goes on."""
    return [token_ids[index % len(token_ids)] for index in range(length)]


class NgramDrafter(Drafter):
    """Looks up the longest suffix of the request's own tokens."""

    cost_per_token = 0.0

    def __init__(self, min_length: int, max_length: int) -> None:
        """min_length, max_length: tokens that must match, and beyond which longer matches do not count."""
        self._min_length = min_length
        self._max_length = max_length

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        proposals = {}
        for task in tasks:
            start = longest_suffix_match(task.token_ids, self._min_length, self._max_length)
            if start is not None:
                proposals[task.request_id] = repeat(
                    task.token_ids[start : start + task.max_tokens].tolist(), task.max_tokens
                )
        return proposals


class SuffixAutomaton:
    """All substrings of a growing text. States are numbers; 0 is the empty string."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest string of the state
        self._end = [0]  # place after the first occurrence of the state's strings
        self._last = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text. Amortised constant time per token."""
        for token_id in token_ids:
            self._append(token_id)

    def repeated_suffix(self) -> tuple[int, int]:
        """The longest suffix of the text that also occurs earlier: (its length, the place after its first
        occurrence). (0, 0) if no token of it does."""
        link = max(0, self._link[self._last])
        return self._length[link], self._end[link]

    def longest_match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of token_ids that occurs in the text:
        (length, the place after its first occurrence)."""
        state, length = 0, 0
        for token_id in token_ids:
            while state != 0 and token_id not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token_id in self._next[state]:
                state = self._next[state][token_id]
                length += 1
        # The state may hold longer strings than the match; its suffixes of this length end where it does.
        return length, self._end[state]

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        new = self._add_state({}, self._length[self._last] + 1, len(self.token_ids))
        state = self._last
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = 0
        else:
            target = self._next[state][token_id]
            if self._length[target] == self._length[state] + 1:
                self._link[new] = target
            else:  # only the shorter strings of target gain an occurrence: they become a state of their own
                clone = self._add_state(dict(self._next[target]), self._length[state] + 1, self._end[target])
                self._link[clone] = self._link[target]
                self._link[target] = self._link[new] = clone
                while state != -1 and self._next[state].get(token_id) == target:
                    self._next[state][token_id] = clone
                    state = self._link[state]
        self._last = new

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1


class SuffixDrafter(Drafter):
    """Copies what followed the longest match, in the request itself or in earlier outputs.

    Earlier outputs are kept in two generations: when the younger one is full it becomes the older, and the
    older one is forgotten. So no more than max_cached_tokens of them are remembered. Requests learn from
    those of the same cache_salt only: how fast an answer comes must not tell one tenant what another was
    told.
    """

    cost_per_token = 0.0

    def __init__(self, max_cached_tokens: int) -> None:
        self._tokens_per_generation = max(1, max_cached_tokens // 2)
        self._own: dict[str, SuffixAutomaton] = {}
        self._generations: list[dict[str | None, SuffixAutomaton]] = [{}, {}]  # by cache_salt

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        proposals = {}
        for task in tasks:
            own = self._own.get(task.request_id)
            if own is None:
                own = self._own[task.request_id] = SuffixAutomaton()
            own.extend(task.token_ids[len(own.token_ids) :].tolist())
            guess = self._guess(own, task.max_tokens, task.cache_salt)
            if guess:
                proposals[task.request_id] = guess
        return proposals

    def _guess(self, own: SuffixAutomaton, max_tokens: int, cache_salt: str | None) -> list[int]:
        length, start = own.repeated_suffix()
        text = own.token_ids
        recent = text[-LOOKBACK:]
        for generation in self._generations:
            earlier = generation.get(cache_salt)
            if earlier is None:
                continue
            other_length, other_start = earlier.longest_match(recent)
            if other_length > length and other_start < len(earlier.token_ids):
                length, start, text = other_length, other_start, earlier.token_ids
        if length < MIN_MATCH:
            return []
        if text is own.token_ids:
            return repeat(text[start : start + max_tokens], max_tokens)
        return text[start : start + max_tokens]

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Remember the request's output for others of the same cache_salt."""
        self._own.pop(request_id, None)
        kept = output_token_ids[-self._tokens_per_generation :]
        num_young = sum(len(earlier.token_ids) for earlier in self._generations[0].values())
        if num_young + len(kept) > self._tokens_per_generation:
            self._generations = [{}, self._generations[0]]
        if kept:
            self._generations[0].setdefault(cache_salt, SuffixAutomaton()).extend(kept)
