"""Fields of OpenAI's API that this server has no use for: only values that change nothing are accepted.

A label (``safety_identifier``) is for the caller's own use, so any is. Whatever else a field could ask for is refused
by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from minivllm.server.wire.fields import Body, Label

Nothing = Annotated[list[Any], Field(max_length=0)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]
NeutralVerbosity = Literal["medium"] | None
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class PromptCacheOptions(Body):
    """Prefixes are always looked up and kept for as long as there is room, which no option changes."""

    mode: Literal["implicit"] | None = None
    ttl: None = None
    comparison_response_id: None = None
    prewarm: Literal[False] | None = None


class NeutralFields(Body):
    """What conversations share, on both endpoints.

    metadata, safety_identifier, prompt_cache_key: labels of the caller's own, without effect (see cache_salt).
    """

    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    moderation: None = None
