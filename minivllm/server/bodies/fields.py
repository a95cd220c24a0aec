"""Fields that stand in several bodies, under OpenAI's names and vLLM's.

Prompts, sampling parameters, and fields of OpenAI's API that this server has no use for: of those, only
values that change nothing are accepted. A label (``safety_identifier``) is for the caller's own use, so any
is. Whatever else a field could ask for is refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, StringConstraints, Tag

from minivllm.errors import RequestError
from minivllm.sampling_params import (
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_PATTERNS,
    MAX_STOP_STRINGS,
    OutputKind,
    SamplingParams,
    StructuredOutputs,
)
from minivllm.server.bodies.body import Body
from minivllm.server.bodies.errors import ApiError
from minivllm.server.bodies.formats import ResponseFormat
from minivllm.server.bodies.json_bounds import JsonBounds
from minivllm.server.bodies.other_clients import LABELS

MAX_STOP_LENGTH = 1024
MAX_LIST_LENGTH = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_EXTRA_ARGS = 64

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ExtraName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
PlainValue = bool | int | float | Annotated[str, StringConstraints(max_length=4096)]
ExtraValue = PlainValue | Annotated[list[PlainValue], Field(max_length=MAX_LIST_LENGTH)]
Label = Annotated[str, StringConstraints(max_length=512)]


class StructuredOutputsFields(Body):
    """What an answer must look like, under vLLM's names: exactly one of the first five;
    see ``StructuredOutputs``."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class RepetitionDetectionFields(Body):
    """See ``RepetitionDetection``."""

    max_pattern_size: int
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingFields(Body):
    """Parameters that every generating endpoint has. top_p: 0 takes the likeliest token, as OpenAI's.
    thinking_token_budget: vLLM's name of thinking_budget. vllm_xargs: for custom logits processors."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_regex: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_PATTERNS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LIST_LENGTH)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_LIST_LENGTH)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LIST_LENGTH)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_LIST_LENGTH)] | None = None
    skip_special_tokens: bool | None = None
    repetition_detection: RepetitionDetectionFields | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    structured_outputs: StructuredOutputsFields | None = None
    vllm_xargs: Annotated[dict[ExtraName, ExtraValue], Field(max_length=MAX_EXTRA_ARGS)] | None = None

    def structure(self) -> StructuredOutputs | None:
        """The structure asked for as ``structured_outputs``.
        Raises ApiError 400 for one that contradicts itself."""
        if self.structured_outputs is None:
            return None
        schema = self.structured_outputs.json_
        if (
            isinstance(schema, str) and len(schema) <= MAX_GRAMMAR_BYTES
        ):  # a longer one is refused, and never parsed
            # A text inside the body, so the bounds of the body have not seen into it.
            JsonBounds().check(schema.encode(errors="replace"), "structured_outputs.json")
        try:
            return StructuredOutputs(**self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        except RequestError as error:
            raise ApiError(400, str(error), param="structured_outputs", code="invalid_value") from None

    def sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """``defaults`` overridden by what was given here and in ``others``.
        Raises RequestError or ApiError 400."""
        values = {name: getattr(self, name) for name in SamplingFields.model_fields}
        del values["vllm_xargs"], values["thinking_token_budget"]
        if self.thinking_budget is None:
            values["thinking_budget"] = self.thinking_token_budget
        values |= {"structured_outputs": self.structure(), "extra_args": self.vllm_xargs}
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.model_dump(exclude_none=True)
        for name in ("stop", "stop_regex"):
            if isinstance(values[name], str):
                values[name] = [values[name]]
        if self.top_p == 0:  # the smallest set of tokens with any mass at all
            values |= {"top_p": 1.0, "top_k": 1}
        if self.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
            if len(values["logit_bias"]) != len(self.logit_bias):
                raise RequestError("logit_bias names a token id twice, but may name each once.")
        given = {name: value for name, value in values.items() if value is not None}
        return msgspec.structs.replace(defaults, **{**given, **others})


class StreamOptions(Body):
    """include_usage: end the stream with a chunk that counts tokens. continuous_usage_stats: count in every
    chunk then. include_obfuscation: chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CallerFields(Body):
    """What every endpoint that computes has.

    model: one of the served names; left out, the first one. user: a label of the caller's own, without
    effect. priority: lower goes first, with scheduling_policy "priority". cache_salt: keeps cached prefixes
    of tenants apart.
    """

    labels = LABELS
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None


class RequestFields(SamplingFields, CallerFields):
    """What completions of texts and of conversations have besides sampling parameters.

    best_of: so many are generated, and the n likeliest come back; not in streams. request_id: stands in the
    answer's id. prompt_logprobs: alternatives to report per token of the prompt; not in streams.
    return_token_ids: report the ids of prompt and answer. return_tokens_as_token_ids: call tokens
    ``token_id:ID`` in log-probabilities. truncate_prompt_tokens: keep at most so many tokens of the prompt,
    its last ones; -1 for as many as fit. use_beam_search: n (or best_of) beams instead of sampling; their n
    likeliest sequences come back, by their score with length_penalty (see BeamSearchParams); not in streams.
    """

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None

    @property
    def output_kind(self) -> OutputKind:
        return OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream and self.stream_options is not None and self.stream_options.include_usage)


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

    metadata, safety_identifier, prompt_cache_key:
    labels of the caller's own, without effect (see cache_salt).
    """

    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    moderation: None = None


MAX_PROMPTS = 2048

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


def _kind_of_prompts(prompts: Any) -> str:
    """Told by the first entry, so that what is wrong with the others is told as it is."""
    if not isinstance(prompts, list):
        return "a text"
    first = prompts[0] if prompts else ""
    return (
        "lists of token ids"
        if isinstance(first, list)
        else "token ids"
        if isinstance(first, int)
        else "texts"
    )


Prompts = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists of token ids")],
    Discriminator(_kind_of_prompts),
]


def prompt_list(prompts: Prompts) -> list[str | list[int]]:
    """One entry per prompt, whatever form they came in."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def as_prompt(given: str | list[int]) -> str | dict[str, Any]:
    """One of them as the engine takes it."""
    return given if isinstance(given, str) else {"prompt_token_ids": given}
