"""When a sequence ends, as far as token ids can tell. Stop strings are the frontend's."""

from __future__ import annotations

from minivllm.request import Request, RequestStatus


def append_until_stop(request: Request, token_ids: list[int]) -> list[int]:
    """Append tokens one by one until one ends the sequence;
    returns those that count, without one that is an error.

    Order of the checks: the request's own stop conditions, min_tokens (no stop token counts before it), end
    of sequence, stop ids, length. On an end the status tells which one it was, and stop_reason names it.
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
