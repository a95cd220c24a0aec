"""Which part of the running requests one step samples for,
so that all stages of a pipeline have something to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minivllm.request import Request
from minivllm.scheduler.steps.step_plan import InFlightStep


def stage_share(
    running: Sequence[Request], in_flight: Collection[InFlightStep], num_stages: int
) -> tuple[int, frozenset[str]]:
    """(how many requests that lack one token a step may take, those that other stages are computing).

    Their next token, scheduled now, would make the first stage wait for the last one. Of the others, this
    step leaves enough for those that follow before the oldest one is back, and takes no more than an equal
    part of all.
    """
    newest = list(in_flight)[1 - num_stages :]
    busy = frozenset(
        name for step in newest for name in step.output.num_scheduled_tokens.keys() - step.unfinished_prompts
    )
    decoding = [
        request.request_id
        for request in running
        if request.num_tokens + request.num_output_placeholders - request.num_computed_tokens <= 1
    ]
    free = sum(name not in busy for name in decoding)
    return min(-(-len(decoding) // num_stages), -(-free // (num_stages - len(newest)))), busy
