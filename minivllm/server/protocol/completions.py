"""``/v1/completions``, ``/v1/embeddings``, ``/v1/score``:
bodies and answers about texts, and counts of tokens."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from minivllm.sampling_params import MAX_LOGPROBS
from minivllm.server.bodies.body import OrDefault
from minivllm.server.bodies.fields import (
    MAX_PROMPTS,
    MAX_TOKEN_ID,
    CallerFields,
    Prompts,
    RequestFields,
    Text,
)


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


class CompletionRequest(RequestFields):
    """Texts to continue.

    prompt: a text, a list of texts, token ids or lists of token ids. Special tokens in a text count as such,
    as in vLLM: a client that sends a whole prompt writes its turns too. echo: repeat the prompt before its
    completion, with logprobs of its tokens if those are asked for. max_tokens: 16 if left out, 0 only with
    echo. logprobs: how many alternatives to report per token. add_special_tokens: True puts around a text
    what the tokenizer puts around texts. suffix: none, the models served here do not fill gaps.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None


class CompletionLogprobs(TypedDict):
    """One entry per token; the first token of an echoed prompt has none.
    text_offset: where each token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """rank: 1 is the likeliest token at that place."""

    logprob: float
    rank: int
    decoded_token: str | None


class CompletionChoice(TypedDict):
    """index: prompt number × n + number of the completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[int | str]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Completion(TypedDict):
    """created: Unix time [seconds].
    usage: null on the chunks of a stream but the last one, if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class PoolingFields(CallerFields):
    """pooling: the state of the last token, or the mean of all.
    truncate_prompt_tokens: see ``RequestFields``."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    pooling: OrDefault[Literal["last", "mean"]] = "last"


class EmbeddingRequest(PoolingFields):
    """input: what is to become vectors.
    encoding_format: numbers, or base64 of float32 in little-endian order.

    dimensions: understood, so that it can be refused with a reason. normalize: scale to length 1.
    """

    input: Prompts
    encoding_format: OrDefault[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: OrDefault[bool] = True


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


class RerankRequest(PoolingFields):
    """documents: to be put in order, the one most like ``query`` first.
    top_n: how many come back; 0 is all."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    return_documents: bool | None = None


class RerankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    """index: in the request's documents. relevance_score: the cosine of the two vectors, -1 to 1."""

    index: int
    relevance_score: float
    document: NotRequired[RerankedDocument]


class RerankResponse(TypedDict):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
