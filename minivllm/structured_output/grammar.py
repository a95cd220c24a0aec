"""Guides of one request, token by token: its grammar, and its budget for thinking."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minivllm.request import RequestStatus, Stop

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ALL_TOKENS = -1


class Grammar:
    """One matcher, moved on token by token. Implements StopCondition and TokenMaskSource.

    A matcher can give up in the middle of a text when a step would take too long or too much memory; the
    request then ends with an error, at its next token, and no other request is affected.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)

    def copy(self) -> Grammar:
        """Another one in the same state."""
        return Grammar(self._matcher.deep_copy(), self._tokenizer, self._eos_token_ids)

    def append(self, token_id: int) -> Stop | None:
        if self._matcher.is_error() or not self._matcher.consume_token(token_id):
            return Stop(RequestStatus.FINISHED_ERROR, error=self._complaint())
        if token_id in self._eos_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED)
        return None

    def fill(self, rows: np.ndarray, draft_token_ids: list[int]) -> None:
        matcher = self._matcher
        num_ahead = 0
        self._fill_row(rows[0])
        for row, token_id in zip(rows[1:], draft_token_ids, strict=True):
            if matcher.is_stopped() or matcher.try_consume_tokens([token_id]) == 0:
                break
            num_ahead += 1
            self._fill_row(row)
        if num_ahead and not matcher.is_error():
            matcher.rollback(num_ahead)

    def valid_drafts(self, draft_token_ids: list[int]) -> list[int]:
        return draft_token_ids[: self._matcher.validate_tokens(draft_token_ids)]

    def forced_tokens(self) -> list[int]:
        """Where the grammar leaves one text, the tokens the tokenizer would write it with.

        A last token that could be a longer one, depending on what follows, is left out.
        """
        forced = self._matcher.compute_ff_bytes()
        return self.valid_drafts(self._tokenizer.tokenize_partial(forced)[0]) if forced else []

    def _fill_row(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            row.fill(ALL_TOKENS)  # whatever comes ends the request

    def _complaint(self) -> str:
        lines = self._matcher.get_error().strip().splitlines() or ["the matcher stopped"]
        return (
            f"The structured output could not be continued: {lines[0][:300]}. Simplify the schema or grammar."
        )


class ThinkingBudget:
    """Implements StopCondition, to see every token, and TokenMaskSource, to close the thought.

    Thinking starts after the opening tag, in the prompt or in the output, and ends with the closing one. A
    closing tag of several tokens is forced one by one, and only from its beginning: a half-written tag does
    not count.
    """

    def __init__(
        self, budget: int, start_ids: Sequence[int], end_ids: Sequence[int], prompt_token_ids: Sequence[int]
    ) -> None:
        self._budget = budget
        self._start = list(start_ids)
        self._end = list(end_ids)
        self._longest = max(len(self._start), len(self._end))
        self._recent: list[int] = []
        self._is_thinking = False
        self._num_thought = 0
        self._num_forced = 0
        for token_id in prompt_token_ids:
            self._observe(token_id)
        self._num_thought = self._num_forced = 0  # thoughts of the prompt are not the model's

    def append(self, token_id: int) -> Stop | None:
        self._observe(token_id)
        return None

    def fill(self, rows: np.ndarray, draft_token_ids: list[int]) -> None:
        before = self._state()
        for row, token_id in zip(rows, [*draft_token_ids, None]):
            forced = self._forced()
            if forced is not None:
                row.fill(0)
                # Words are signed: bit 31 is the sign.
                row.view("<u4")[forced // 32] = 1 << forced % 32
            if token_id is not None:
                self._observe(token_id)
        self._restore(before)

    def valid_drafts(self, draft_token_ids: list[int]) -> list[int]:
        before = self._state()
        count = 0
        for token_id in draft_token_ids:
            if self._forced() not in (None, token_id):
                break
            self._observe(token_id)
            count += 1
        self._restore(before)
        return draft_token_ids[:count]

    def forced_tokens(self) -> list[int]:
        return [] if self._forced() is None else self._end[self._num_forced :]

    def _forced(self) -> int | None:
        """The token that must come next, if one must."""
        is_over = self._is_thinking and self._num_thought >= self._budget
        return self._end[self._num_forced] if is_over else None

    def _observe(self, token_id: int) -> None:
        if self._forced() == token_id:
            self._num_forced += 1
        self._recent = [*self._recent, token_id][-self._longest :]
        if self._is_thinking and self._recent[-len(self._end) :] == self._end:
            self._is_thinking = False
        elif not self._is_thinking and self._recent[-len(self._start) :] == self._start:
            self._is_thinking = True
            self._num_thought = self._num_forced = 0
        elif self._is_thinking:
            self._num_thought += 1

    def _state(self) -> tuple[list[int], bool, int, int]:
        return self._recent, self._is_thinking, self._num_thought, self._num_forced

    def _restore(self, state: tuple[list[int], bool, int, int]) -> None:
        self._recent, self._is_thinking, self._num_thought, self._num_forced = state
