"""When a sequence ends, as far as token ids can tell. Stop strings are the frontend's."""

from __future__ import annotations

from minivllm.request import Request, RequestStatus, Stop
from minivllm.sampling_params import RepetitionDetection

STOP_REASON = "repetition"


def append_until_stop(request: Request, token_ids: list[int]) -> list[int]:
    """Append tokens one by one until one ends the sequence; returns those that count, without one that is an error.

    Order of the checks: the request's own stop conditions, min_tokens (no stop token counts before it), end of
    sequence, stop ids, length. On an end the status tells which one it was, and stop_reason names it.
    """
    params, eos_token_ids = request.sampling_params, request.engine_request.eos_token_ids
    num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.max_tokens
    all_token_ids = request.all_token_ids
    for count, token_id in enumerate(token_ids, 1):
        all_token_ids.append(token_id)
        for condition in request.stop_conditions:
            stop = condition.append(token_id)
            if stop is not None:
                request.status, request.stop_reason, request.error = stop.status, stop.stop_reason, stop.error
                if stop.status is RequestStatus.FINISHED_ERROR:
                    all_token_ids.pop()
                    return token_ids[: count - 1]
                return token_ids[:count]
        num_output_tokens = len(all_token_ids) - num_prompt_tokens
        if num_output_tokens >= params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                request.status = RequestStatus.FINISHED_STOPPED
                return token_ids[:count]
            if token_id in params.stop_token_ids:
                request.status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = token_id
                return token_ids[:count]
        if num_output_tokens >= max_tokens:
            request.status = RequestStatus.FINISHED_LENGTH
            return token_ids[:count]
    return token_ids


class RepetitionDetector:
    """StopCondition: the same pattern of tokens several times in a row, with stop_reason "repetition".

    For every pattern length p it counts how many tokens in a row equal the one p places before: a pattern that stands
    there c times has made (c - 1) * p of them. One comparison per token and length, whatever the length of the output.
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
