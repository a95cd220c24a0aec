"""Prompts as they stand in a body: a text, a list of texts, token ids, or a list of lists of token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from minivllm.server.wire.fields import TokenId

MAX_PROMPTS = 2048

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Prompts = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def prompt_list(prompts: Prompts) -> list[str | list[int]]:
    """One entry per prompt, whatever form they came in."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def as_prompt(given: str | list[int], cache_salt: str | None) -> dict[str, object]:
    """One of them as the engine takes it."""
    prompt: dict[str, object] = {"prompt" if isinstance(given, str) else "prompt_token_ids": given}
    return prompt if cache_salt is None else {**prompt, "cache_salt": cache_salt}
