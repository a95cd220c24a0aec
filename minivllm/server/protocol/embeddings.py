"""``/v1/embeddings`` and ``/v1/score``: texts as vectors, and how alike two are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from minivllm.server.protocol.prompts import Prompts
from minivllm.server.wire.fields import Body, CacheSalt, Label, ModelName, Priority


class PoolingFields(Body):
    """model: one of the served names; left out, the first one. pooling: the state of the last token, or the mean of
    all. priority, cache_salt, user: as in completions."""

    model: ModelName | None = None
    pooling: Literal["last", "mean"] = "last"
    user: Label | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingRequest(PoolingFields):
    """input: what is to become vectors. encoding_format: numbers, or base64 of float32 in little-endian order.

    dimensions: understood, so that it can be refused with a reason. normalize: scale to length 1.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool = True


class ScoreRequest(PoolingFields):
    """text_1: one, to be compared with each of text_2, or as many as those, to be compared pair by pair."""

    text_1: Prompts
    text_2: Prompts


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """embedding: numbers, or base64 of float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(TypedDict):
    """score: the cosine of the two vectors, -1 to 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(TypedDict):
    """created: Unix time [seconds]."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
