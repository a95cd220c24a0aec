"""Steps of made-up requests that read and write nothing but the null block,
to warm up with and to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from minivllm.kv_cache.specs import GroupSpec
from minivllm.messages import UNKNOWN, EngineRequest, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams


def null_step(groups: Sequence[GroupSpec], counts: Sequence[int], num_guesses: int = 0) -> SchedulerOutput:
    """One request with counts[i] tokens for each i, which samples one more. num_guesses: that the workers
    make after it, and after the step that verifies them."""
    names = [f"warm-up-{index}" for index in range(len(counts))]
    ends = [count + 2 * num_guesses + 1 if num_guesses else count for count in counts]
    requests = [_null_request(groups, *given) for given in zip(names, counts, ends)]
    return SchedulerOutput(
        num_scheduled_tokens=dict(zip(names, counts)),
        new_requests=requests,
        num_guesses=dict.fromkeys(names, num_guesses) if num_guesses else {},
    )


def verification_after(step: SchedulerOutput) -> SchedulerOutput:
    """Verifies the guesses that two requests of a null step got."""
    guesses = dict(list(step.num_guesses.items())[:2])
    return SchedulerOutput(
        num_scheduled_tokens={name: 1 + count for name, count in guesses.items()},
        draft_token_ids={name: [UNKNOWN] * count for name, count in guesses.items()},
        num_guesses=guesses,
    )


def null_verification(groups: Sequence[GroupSpec], num_drafts: int) -> SchedulerOutput:
    """Verifies so many drafts of one request, of which all but one token is computed."""
    name, count = "verification", 1 + num_drafts
    request = msgspec.structs.replace(_null_request(groups, name, 2, 2 + num_drafts), num_computed_tokens=1)
    drafts = {name: [0] * num_drafts} if num_drafts else {}
    return SchedulerOutput(num_scheduled_tokens={name: count}, new_requests=[request], draft_token_ids=drafts)


def run_null_step(
    execute: Callable[[SchedulerOutput], object], step: SchedulerOutput, *others: SchedulerOutput
) -> float:
    """Run such a step, and others of the same requests, which are forgotten then. Returns the seconds that
    all of them took."""
    started = time.perf_counter()
    try:
        for one in (step, *others):
            execute(one)
        return time.perf_counter() - started
    finally:
        execute(SchedulerOutput(finished_request_ids=list(step.num_scheduled_tokens)))


def _null_request(
    groups: Sequence[GroupSpec], name: str, num_prompt_tokens: int, num_tokens: int
) -> NewRequestData:
    """A greedy request with room for num_tokens, all of it in the null block."""
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=[0] * num_prompt_tokens,
        sampling_params=SamplingParams(temperature=0.0),
        max_tokens=num_tokens,
        seed=0,
        arrival_time=0.0,
    )
    blocks = tuple([0] * -(-num_tokens // group.block_size) for group in groups)
    return NewRequestData(request=request, block_ids=blocks, num_computed_tokens=0)
