"""How many tokens a request took."""

from __future__ import annotations

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(TypedDict):
    """completion_tokens counts all n completions; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
