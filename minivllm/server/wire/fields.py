"""Fields that stand in several bodies, under OpenAI's names and vLLM's.

Prompts, sampling parameters, and fields of OpenAI's API that this server has no use for: of those, only values that
change nothing are accepted. A label (``safety_identifier``) is for the caller's own use, so any is. Whatever else a
field could ask for is refused by name.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from minivllm.errors import RequestError
from minivllm.sampling_params import (
    MAX_GRAMMAR_BYTES,
    MAX_N,
    MAX_STOP_PATTERNS,
    MAX_STOP_STRINGS,
    OutputKind,
    SamplingParams,
    StructuredOutputs,
)
from minivllm.server.wire.errors import ApiError
from minivllm.server.wire.json_bounds import JsonBounds
from minivllm.server.wire.other_clients import LABELS, is_ignored

MAX_STOP_LENGTH = 1024
MAX_LIST_LENGTH = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_EXTRA_ARGS = 64
MAX_UNKNOWN_FIELDS = 8

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ExtraName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
PlainValue = bool | int | float | Annotated[str, StringConstraints(max_length=4096)]
ExtraValue = PlainValue | Annotated[list[PlainValue], Field(max_length=MAX_LIST_LENGTH)]
Label = Annotated[str, StringConstraints(max_length=512)]


T = TypeVar("T")


class _OrNull:
    """Says in the schema what ``Body`` does: null is the default."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core), {"type": "null"}]}


OrDefault = Annotated[T, _OrNull()]
"""Type of a field with a default other than None."""


def _fail_fast(schema: Any) -> None:
    """Let every list inside a schema end at its first error, and every dictionary be counted first."""
    if isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)
    if not isinstance(schema, dict) or (
        schema.get("type") == "function-before" and schema["schema"].get("type") == "dict"  # done before
    ):
        return
    for inner in schema.values():
        _fail_fast(inner)
    if schema.get("type") == "list":
        schema["fail_fast"] = True
    elif schema.get("type") == "dict" and schema.get("max_length") is not None:
        counted = dict(schema)
        limit = counted["max_length"]

        def count(values: Any) -> Any:
            if isinstance(values, dict) and len(values) > limit:
                sizes = {"field_type": "Dictionary", "max_length": limit, "actual_length": len(values)}
                raise PydanticKnownError("too_long", sizes)
            return values

        schema.clear()
        schema.update(core_schema.no_info_before_validator_function(count, counted))


class Body(BaseModel):
    """Base of all bodies: no unknown field, no conversion between types, no NaN or infinity.

    A field that may be left out may be null as well, which means the same, at every depth.
    What is wrong is reported a few times, not a million times: a list is left at its first wrong entry, a dictionary
    that is too long is not looked at, and of unknown fields a few are.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    labels: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that are left out instead of being refused."""

    @model_validator(mode="before")
    @classmethod
    def _fields_that_say_something(cls, values: Any) -> Any:
        """Without nulls in place of fields that may be left out, without labels, and with few unknown fields."""
        if not isinstance(values, dict):
            return values
        is_required = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        kept, num_unknown = {}, 0
        for name, value in values.items():
            if name in is_required:
                if value is not None or is_required[name]:
                    kept[name] = value
            elif num_unknown < MAX_UNKNOWN_FIELDS and not is_ignored(name, cls.labels):
                kept[name] = value
                num_unknown += 1
        return kept

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class StructuredOutputsFields(Body):
    """What an answer must look like, under vLLM's names: exactly one of the first five; see ``StructuredOutputs``."""

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
    """Parameters that every generating endpoint has. top_p: 0 takes the likeliest token, as OpenAI's. vllm_xargs: for
    custom logits processors."""

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
    structured_outputs: StructuredOutputsFields | None = None
    vllm_xargs: Annotated[dict[ExtraName, ExtraValue], Field(max_length=MAX_EXTRA_ARGS)] | None = None

    def structure(self) -> StructuredOutputs | None:
        """The structure asked for as ``structured_outputs``. Raises ApiError 400 for one that contradicts itself."""
        if self.structured_outputs is None:
            return None
        schema = self.structured_outputs.json_
        if isinstance(schema, str) and len(schema) <= MAX_GRAMMAR_BYTES:  # a longer one is refused, and never parsed
            # A text inside the body, so the bounds of the body have not seen into it.
            JsonBounds().check(schema.encode(errors="replace"), "structured_outputs.json")
        try:
            return StructuredOutputs(**self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        except RequestError as error:
            raise ApiError(400, str(error), param="structured_outputs", code="invalid_value") from None

    def sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """``defaults`` overridden by what was given here and in ``others``. Raises RequestError or ApiError 400."""
        values = {name: getattr(self, name) for name in SamplingFields.model_fields if name != "vllm_xargs"}
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
    """include_usage: end the stream with a chunk that counts tokens. include_obfuscation: chunks are never padded."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CallerFields(Body):
    """What every endpoint that computes has.

    model: one of the served names; left out, the first one. user: a label of the caller's own, without effect.
    priority: lower goes first, with scheduling_policy "priority". cache_salt: keeps cached prefixes of tenants apart.
    """

    labels = LABELS
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None


class RequestFields(SamplingFields, CallerFields):
    """What completions of texts and of conversations have besides sampling parameters.

    return_tokens_as_token_ids: call tokens ``token_id:ID`` in log-probabilities.
    """

    return_tokens_as_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

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

    metadata, safety_identifier, prompt_cache_key: labels of the caller's own, without effect (see cache_salt).
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
    return "lists of token ids" if isinstance(first, list) else "token ids" if isinstance(first, int) else "texts"


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
