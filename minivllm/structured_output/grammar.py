"""The grammar of one request while it is being followed: which tokens may come, and whether it may end."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from minivllm.request import RequestStatus, Stop

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

ALL_TOKENS = -1


class Grammar:
    """One matcher, moved on token by token. Implements StopCondition and TokenMaskSource.

    A matcher can give up in the middle of a text when a step would take too long or too much memory; the request then
    ends with an error, at its next token, and nobody else is affected.
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
        return f"The structured output could not be continued: {lines[0][:300]}. Simplify the schema or grammar."
