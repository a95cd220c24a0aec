"""Ends a sequence that goes round in circles: the same pattern of tokens, several times in a row."""

from __future__ import annotations

from minivllm.request import RequestStatus, Stop
from minivllm.sampling_params import RepetitionDetection

STOP_REASON = "repetition"


class RepetitionDetector:
    """Implements StopCondition with stop_reason "repetition".

    For every pattern length p it counts how many tokens in a row equal the one p places before: a pattern
    that stands there c times has made (c - 1) * p of them. One comparison per token and length, whatever the
    length of the output.
    """

    def __init__(self, params: RepetitionDetection, min_tokens: int) -> None:
        """min_tokens: the output does not end before so many."""
        self._sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
        self._repeats = params.min_count - 1
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._runs = [0] * len(self._sizes)

    def append(self, token_id: int) -> Stop | None:
        token_ids, runs = self._token_ids, self._runs
        count = len(token_ids)
        is_found = False
        for index, size in enumerate(self._sizes):
            if size > count:
                break
            runs[index] = runs[index] + 1 if token_ids[count - size] == token_id else 0
            is_found |= runs[index] >= self._repeats * size
        token_ids.append(token_id)
        is_over = is_found and len(token_ids) >= self._min_tokens
        return Stop(RequestStatus.FINISHED_STOPPED, STOP_REASON) if is_over else None
