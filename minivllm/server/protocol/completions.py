"""``/v1/completions``: the body, the answer, which is also the form of a stream's chunks."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from minivllm.sampling_params import MAX_LOGPROBS, MAX_N
from minivllm.server.protocol.prompts import Prompts
from minivllm.server.protocol.usage import Usage
from minivllm.server.wire.fields import MAX_TOKEN_ID, RequestFields


class CompletionRequest(RequestFields):
    """Texts to continue.

    prompt: a text, a list of texts, token ids or lists of token ids. Special tokens in a text count as such, as in
    vLLM: whoever sends a whole prompt writes its turns too. echo: repeat the prompt before its completion, with
    logprobs of its tokens if those are asked for. max_tokens: 16 if left out, 0 only with echo. logprobs: how many
    alternatives to report per token. best_of: so many are generated, and the n likeliest come back; not in streams.
    suffix: none, the models served here do not fill gaps.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None


class CompletionLogprobs(TypedDict):
    """One entry per token; the first token of an echoed prompt has none. text_offset: where each token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """index: prompt number × n + number of the completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[int | str]


class Completion(TypedDict):
    """created: Unix time [seconds]. usage: null on the chunks of a stream but the last one, if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
