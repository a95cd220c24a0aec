"""Whether a request can ever run, and what besides blocks and budget a waiting one may need first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.request import Request


class AdmissionPolicy(Protocol):
    """Asked in every step about each waiting request whose turn it is, in their order.

    A request that may not run yet is set aside:
    the ones after it are asked next, and it keeps its place in the queue.
    """

    def begin_step(self) -> None:
        """Begin to ask about the waiting requests of a step; called only if there are some."""
        ...

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """True if the request may join those that run; blocks may still be missing afterwards."""
        ...


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
