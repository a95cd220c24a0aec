"""How one request is sampled: the user's parameters, validated once, then carried unchanged to the worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from minivllm.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 100
MAX_LOGPROB_TOKEN_IDS = 1000
MAX_STOP_STRINGS = 64
MAX_STOP_PATTERNS = 16
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 1000
MAX_EXTRA_ARGS_BYTES = 1024 * 1024
MAX_PATTERN_SIZE = 256
MAX_INTEGER = 2**63 - 1
"""Of fields without a bound of their own: the largest that processes can send one another."""
FALLBACK_SAMPLING: Mapping[str, float] = {"temperature": 0.2}
"""Used by every frontend where neither the request nor the model's generation_config.json says how to sample.
A request that names a temperature changes nothing else by it.

Of 40 short questions of general knowledge SmolLM2-135M-Instruct answers 70 % correctly with it, 72 % with the
likeliest token alone, and 58 % with temperature 0.7 and top-p 0.95."""


class OutputKind(StrEnum):
    """What each ``RequestOutput`` of a stream carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


_WHAT_FIELDS_ARE = {
    "StructuredOutputs": "an option of structured outputs",
    "RepetitionDetection": "an option of repetition detection",
}


class _NamesUnknownFields(msgspec.StructMeta):
    """Makes a misspelt field name a RequestError that lists the known ones,
    where msgspec has a bare TypeError."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for name in values:
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                what = _WHAT_FIELDS_ARE.get(cls.__name__, "a sampling parameter")
                raise RequestError(f"{name!r} is not {what}; known are: {known}.")
        return super().__call__(*args, **values)


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of tools, written as the model has learnt to write them, or an answer in their place.

    calls: (begin, JSON schema, end) for each way to write one; the schema is for what stands in between.
    separator: stands between calls; None allows one call only.
    answer: JSON schema of the answer; None is no answer. Schemas are JSON as text.
    """

    calls: list[tuple[str, str, str]]
    separator: str | None = None
    answer: str | None = None


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamesUnknownFields
):
    """What the output must look like: exactly one of the first six.
    Raises RequestError naming what contradicts.

    json: a JSON schema, as a dictionary, as text, or as a pydantic model; kept as text.
    regex: a regular expression (Rust's regex syntax) the whole output matches.
    choice: the output is one of these strings.
    grammar: a context-free grammar, in Lark's or llama.cpp's (GBNF) notation; the output is one of its
    sentences. json_object: True for any JSON object.
    tool_calls: see ToolCalls.
    disable_any_whitespace: JSON without whitespace between its tokens.
    whitespace_pattern: a regular expression for the
        whitespace between them. Both only with json or json_object, and one at most.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    tool_calls: ToolCalls | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "tool_calls")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = "none of them" if not given else " and ".join(given)
            raise RequestError(
                f"structured_outputs has {found}, but must have exactly one of {', '.join(kinds)}."
            )
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _json_schema_text(self.json))
        if self.json_object is not None:
            _check(self.json_object is True, "json_object", self.json_object, "True or left out")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            _check(text is None or (isinstance(text, str) and text != ""), name, text, "a non-empty text")
        if self.choice is not None:
            _check(
                isinstance(self.choice, list), "choice", self.choice, f"a list of 1 to {MAX_CHOICES} strings"
            )
            if not 0 < len(self.choice) <= MAX_CHOICES:
                raise RequestError(
                    f"choice has {len(self.choice)} strings, but must have 1 to {MAX_CHOICES} of them."
                )
            for text in self.choice:
                _check(isinstance(text, str) and text != "", "choice", text, "a list of non-empty strings")
        is_json = given[0] in ("json", "json_object")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and not is_json:
            raise RequestError(
                f"Whitespace options are for json and json_object, but structured_outputs has {given[0]}."
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "disable_any_whitespace and whitespace_pattern contradict each other: set one of them."
            )
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"The {given[0]} of structured_outputs has {size} bytes, but may have at most "
                f"{MAX_GRAMMAR_BYTES}: "
                "make it smaller."
            )
        try:
            (self.source + (self.whitespace_pattern or "")).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"The {given[0]} of structured_outputs has half a surrogate pair, but must be text for UTF-8."
            ) from None

    @property
    def key(self) -> tuple[str | bool | None, ...]:
        """Equal for what compiles to the same; hashable."""
        others = ("choice", "regex", "grammar", "tool_calls")
        kind = next((name for name in others if getattr(self, name)), "json")
        return kind, self.source, self.disable_any_whitespace, self.whitespace_pattern

    @property
    def source(self) -> str:
        """The text that is compiled: schema, expression or grammar; JSON for choice and tool_calls."""
        if self.choice is not None:
            return _dump_json(self.choice)
        if self.tool_calls is not None:
            return _dump_json(msgspec.to_builtins(self.tool_calls))
        if self.json_object:
            return '{"type":"object"}'
        return str(self.json or self.regex or self.grammar)


def _json_schema_text(schema: Any) -> str:
    """The schema as compact JSON, in the order of its keys,
    which is the order in which properties are written."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_BYTES:
            return schema
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is not a JSON schema: {error}.") from None
    if not isinstance(schema, dict):
        raise RequestError(
            f"json is of type {type(schema).__name__}, but must be a JSON schema (an object) or a "
            "pydantic model."
        )
    return _dump_json(schema)


def _dump_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs cannot be written as JSON: {error}.") from None


class RepetitionDetection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamesUnknownFields
):
    """The output ends where its last tokens are one pattern min_count times in a row,
    with stop_reason "repetition".

    Patterns of min_pattern_size to max_pattern_size tokens count.
    Raises RequestError naming the field and its range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3

    def __post_init__(self) -> None:
        check_integer("max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        check_integer("min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_integer("min_count", self.min_count, 2)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamesUnknownFields
):
    """Sampling parameters of one request, under vLLM's names.
    None is the default of every field but max_tokens.

    Raises RequestError naming the field and its range.

    n: completions per prompt.
    temperature: 0 is greedy; logits are divided by it otherwise.
    top_p, top_k, min_p: keep the smallest set of tokens with mass top_p in (0, 1];
    the top_k likeliest (0 or -1: all);
        those with at least min_p of the likeliest one's probability.
    seed: same seed and prompt, same tokens, whatever runs beside it. None draws one from the engine's seed.
    presence_penalty, frequency_penalty: subtracted for tokens already generated, once / per occurrence, in
    [-2, 2]. repetition_penalty: divides (multiplies, below zero) the logits of tokens in prompt or output, >
    0.
    stop: strings that end the text; stop_token_ids: ids that end it; include_stop_str_in_output keeps the
    string. stop_regex: regular expressions (Python's syntax, without anchors, lookaround and backreferences)
    that end the text
        as soon as one of them has matched, before the match; include_stop_str_in_output keeps it.
    ignore_eos: go on after the model's end-of-sequence ids.
    min_tokens: no end before this many tokens; max_tokens: at most so many (None: the rest of the context).
    logprobs / prompt_logprobs: how many alternatives to report per generated / prompt token (None:
    off, 0: only the
        token itself). prompt_logprobs_start: those of the prompt begin at this position, from 0; the tokens
        before it may come from the prefix cache, but for the last of them.
    logprob_token_ids: report these ids per generated token, in this order,
    in place of the likeliest ones. Sets
        logprobs to 0 if that is None.
    logit_bias: token id -> value added to its logit, in [-100, 100].
    allowed_token_ids: nothing else can be sampled.
    bad_words: the tokens of these strings cannot come one after the
        other. The same letters may still appear as other tokens, and inside longer words.
    skip_special_tokens: leave special tokens out of the text.
    best_of: completions that are generated,
    of which the n with the highest cumulative_logprob come back, best first;
        not in streams. None: as many as n.
    repetition_detection: see RepetitionDetection; None is off.
    thinking_budget: most tokens between <think> and </think>, the tags of the model's chat template;
    the closing tag
        is forced after them. None is no limit.
    structured_outputs: see StructuredOutputs.
    The end of sequence is possible only where the structure may end; where
        it must end and other constraints leave no token, the structure has the last word.
    extra_args: plain values by name for custom logits processors (see minivllm.LogitsProcessor).
    output_kind: see OutputKind.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = msgspec.field(default_factory=list)
    stop_regex: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    skip_special_tokens: bool = True
    best_of: int | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(SamplingParams):
            value = getattr(self, field.name)
            if value is None and field.name != "max_tokens":  # as in vLLM, the default
                default = (
                    field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
                )
                msgspec.structs.force_setattr(self, field.name, default)
            elif field.name in _TYPES:
                if field.name in ("stop", "stop_regex") and isinstance(value, str):
                    value = [value]
                msgspec.structs.force_setattr(self, field.name, _of_type(field.name, value))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            _number(name, getattr(self, name))
        check_integer("n", self.n, 1, MAX_N)
        _check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        check_integer("top_k", self.top_k, -1)
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "from -2 to 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "from -2 to 2")
        _check(
            0 < self.repetition_penalty <= 10,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0, at most 10",
        )
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens, which is {self.max_tokens}",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprobs_start is {self.prompt_logprobs_start}, but no log-probabilities of the "
                "prompt are "
                "wanted: set prompt_logprobs as well."
            )
        if self.logprob_token_ids is not None:
            count = len(self.logprob_token_ids)
            _check(
                0 < count <= MAX_LOGPROB_TOKEN_IDS,
                "logprob_token_ids",
                count,
                f"1 to {MAX_LOGPROB_TOKEN_IDS} ids",
            )
            if self.logprobs is None:
                msgspec.structs.force_setattr(self, "logprobs", 0)
        _check(
            len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings"
        )
        num_patterns = len(self.stop_regex)
        _check(
            num_patterns <= MAX_STOP_PATTERNS,
            "stop_regex",
            num_patterns,
            f"at most {MAX_STOP_PATTERNS} strings",
        )
        for name in ("stop", "stop_regex", "bad_words"):
            if "" in getattr(self, name):
                raise RequestError(f"{name} has an empty string, but each must have at least one character.")
        lists = (self.stop_token_ids, self.allowed_token_ids, self.logprob_token_ids, self.logit_bias)
        for token in (token for given in lists for token in given or ()):
            check_integer("a token id", token, 0)
        if self.allowed_token_ids is not None:
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "a list with at least one id")
        for token, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias.{token}", bias)
            _check(-100 <= bias <= 100, f"logit_bias.{token}", bias, "from -100 to 100")
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MAX_N)
        for name, kind in (
            ("repetition_detection", RepetitionDetection),
            ("structured_outputs", StructuredOutputs),
        ):
            value = getattr(self, name)
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                msgspec.structs.force_setattr(self, name, kind(**value))
            elif value is not None:
                _check(isinstance(value, kind), name, value, f"{kind.__name__} or a dictionary")
        if self.thinking_budget is not None:
            check_integer("thinking_budget", self.thinking_budget, 0)
            if self.structured_outputs is not None:
                raise RequestError(
                    "thinking_budget and structured_outputs contradict each other: a structure leaves no "
                    "room."
                )
        if self.extra_args is not None:
            _check_extra_args(self.extra_args)
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos and structured_outputs contradict each other: a structure has an end."
            )

    @property
    def num_sequences(self) -> int:
        """Completions that are generated."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from plain values; wrong types and unknown names raise RequestError with the path."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"Sampling parameters: {str(error).removesuffix('.')}.") from None


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt becomes one vector. Raises RequestError naming the field and its values.

    pooling: "last" takes the final hidden state of the last token, "mean" the mean over all tokens (which
    must all be computed: the prefix cache is not read). normalize: scale to length 1, so that a dot product
    is a cosine.
    """

    pooling: str = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        _check(self.pooling in ("last", "mean"), "pooling", self.pooling, "'last' or 'mean'")
        _check(isinstance(self.normalize, bool), "normalize", self.normalize, "True or False")


_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("stop", "stop_regex"), (list[str], "a string or a list of strings")),
    "bad_words": (list[str], "a list of strings"),
    **dict.fromkeys(
        ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), (list[int], "a list of whole numbers")
    ),
    "logit_bias": (dict[int, float], "a dictionary with a number for each token id"),
    **dict.fromkeys(
        ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), (bool, "True or False")
    ),
    "output_kind": (OutputKind, f"one of {', '.join(OutputKind)}"),
}
"""Fields of SamplingParams whose type alone says what they may be, with words for it."""


def _of_type(name: str, value: Any) -> Any:
    kind, words = _TYPES[name]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise RequestError(f"{name} is {_shown(value)}, but must be {words}.") from None


def _check_extra_args(values: Any) -> None:
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise RequestError(f"extra_args is {values!r}, but must be a dictionary with names as keys.")
    try:
        size = len(msgspec.msgpack.encode(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"extra_args must hold plain values (numbers, texts, lists, …): {error}."
        ) from None
    if size > MAX_EXTRA_ARGS_BYTES:
        raise RequestError(f"extra_args has {size} bytes, but may have at most {MAX_EXTRA_ARGS_BYTES}.")


def _check(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {_shown(value)}, but must be {allowed}.")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name} is {_shown(value)}, but must be a finite number.")


def check_integer(name: str, value: Any, low: int, high: int = MAX_INTEGER) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    limit = f" and at most {high}" if high != MAX_INTEGER or (is_whole and value > high) else ""
    _check(is_whole and low <= value <= high, name, value, f"a whole number of at least {low}{limit}")


def _shown(value: Any) -> str:
    """repr, but of numbers that would fill a page."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return repr(value)
