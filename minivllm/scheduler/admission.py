"""Whether a request can ever run, and what besides blocks and budget a waiting one may need first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.request import Request


class AdmissionPolicy(Protocol):
    """Asked in every step about each waiting request whose turn it is, in their order.

    A request that may not run yet is set aside:
    those behind it are asked next, and it keeps its place in the queue.
    """

    def begin_step(self) -> None:
        """The waiting requests of a step are asked about from here on."""
        ...

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """True if the request may join those that run; a block or two may still be missing afterwards."""
        ...


class AdmitAll(AdmissionPolicy):
    """Nothing else is needed."""

    def begin_step(self) -> None:
        pass

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        return True


class AdmitWhereAll(AdmissionPolicy):
    """What each of several policies asks for is needed."""

    def __init__(self, policies: Sequence[AdmissionPolicy]) -> None:
        self._policies = policies

    def begin_step(self) -> None:
        for policy in self._policies:
            policy.begin_step()

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        return all(policy.may_run(request, running) for policy in self._policies)


def reason_to_refuse(request: Request, max_model_len: int, room: int) -> str | None:
    """Why a request can never run, as a sentence; None if it can. room: see KVCacheManager."""
    if request.num_prompt_tokens < 1:
        return "The prompt is empty, but must hold at least 1 token."
    num_generated = min(1, request.max_tokens)  # none where the prompt becomes a vector
    if request.num_prompt_tokens + num_generated > max_model_len:
        return (
            f"The prompt has {request.num_prompt_tokens} tokens, but max_model_len is {max_model_len}, of "
            "which at "
            f"least {num_generated} for the answer: shorten the prompt."
        )
    num_tokens = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    if num_tokens - num_generated > room:
        return (
            f"The request may grow to {num_tokens} tokens, but the KV cache has room for "
            f"{room + num_generated}: "
            "shorten the prompt, ask for fewer tokens, or give the cache more memory."
        )
    return None
