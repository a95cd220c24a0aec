"""From a JSON schema, expression, list of choices or grammar to a matcher over the model's tokens,
by llguidance.

llguidance (Microsoft's guidance project) walks a trie of the vocabulary with an Earley parser over
derivatives of regular expressions: compiling takes milliseconds, a mask tens of microseconds, and all of it
obeys limits.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.config import EngineConfig
from minivllm.errors import MinivllmError, ModelError, RequestError
from minivllm.sampling_params import StructuredOutputs, ToolCalls
from minivllm.structured_output.grammar import Grammar
from minivllm.structured_output.schemas.json_schema import sound_schema, subschemas

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

DEFAULT_WHITESPACE = r"[ \t\n\r]{1,40}"
"""Room for any indentation, but not for the endless whitespace that a model at a loss likes to write."""
_BLANKS = re.compile(r"(?:[ \t\n\r()|*+?]|\?:|\\[tnrs]|\\x20|\{[0-9,]+\}|\[(?:[ \t\n\r]|\\[tnrs]|\\x20)+\])*")
"""Expressions of nothing but what JSON allows between its tokens."""
ESCAPES = 'nrbtf\\"'
"""Characters after a backslash in a string of JSON, where there is no other spelling."""
SEARCH_SECONDS = 0.2
"""How long inner schemas are tried one by one to find the place of an error."""


def parser_limits() -> LLParserLimits:
    """Limits of one grammar: about 20 ms of lexer construction, 15 ms for one mask, 50 MB of lexer states."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=30_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """Compiles for the vocabulary of one model.
    Thread-safe; the vocabulary is read when it is first needed."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """vocab_size: width of the logits, which is often more than the tokenizer has."""
        self._config = config
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, structured: StructuredOutputs, eos_token_ids: list[int]) -> Grammar:
        """A grammar at its start, to be copied for every request. Raises RequestError or ModelError."""
        from llguidance import LLMatcher

        tokenizer = self.read_vocabulary(eos_token_ids)

        def is_special(text: str) -> bool:
            token_ids = tokenizer.tokenize_str(text)
            return len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])

        grammar = grammar_text(structured, is_special)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        first_mask = np.frombuffer(b"" if matcher.is_error() else matcher.compute_bitmask(), dtype=np.uint8)
        error = matcher.get_error() if matcher.is_error() else ""
        if error and not error.startswith("NoExtensionBias"):
            raise RequestError(_refusal(structured, error))
        if error or not first_mask.any():
            raise RequestError(
                f"Nothing that can be written keeps to this {_kind(structured)}: check it for mistakes."
            )
        return Grammar(matcher, tokenizer, eos_token_ids)

    def read_vocabulary(self, eos_token_ids: list[int]) -> LLTokenizer:
        """The text of every token, read once. Raises ModelError."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_ll_tokenizer(self._config, self._vocab_size, eos_token_ids)
            return self._tokenizer


def load_ll_tokenizer(config: EngineConfig, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The bytes of every token, as a trie.
    Raises ModelError for a tokenizer that llguidance does not know."""
    from llguidance import LLTokenizer

    from minivllm.tokenizer.tokenizer import load_tokenizer

    try:
        if config.tokenizer is None:
            tokenizer = load_tokenizer(config.model_path, config.load_format)
        else:
            tokenizer = load_tokenizer(config.tokenizer)
        return LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=eos_token_ids)
    except MinivllmError:
        raise
    except Exception as error:  # a foreign library, and what it cannot read must not end the engine
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"Structured outputs do not work with the tokenizer of this model: {reason}."
        ) from error


def grammar_text(structured: StructuredOutputs, is_special: Callable[[str], bool]) -> str:
    """llguidance's dialect of Lark for what the user gave.
    Raises RequestError for what can be told without compiling.

    is_special: whether a text such as ``<tool_call>`` is a token of its own,
    beside those that stand for bytes.
    Masks shall allow every token that may come. Where only one text can follow, llguidance would otherwise
    allow only one way of cutting it into tokens, and the output would not follow the model's distribution
    over all ways.
    """
    try:
        lark = _lark(structured, is_special)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(_refusal(structured, str(error))) from None
    return lark if "%llguidance" in lark else '%llguidance {"no_forcing": true}\n' + lark


def _lark(structured: StructuredOutputs, is_special: Callable[[str], bool]) -> str:
    from llguidance import LLMatcher, grammar_from

    if structured.choice is not None:
        # One terminal, so that the strings are one lexeme with one state machine, not as many parser items.
        return f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, structured.choice))}\n"
    if structured.regex is not None:
        return str(json.loads(LLMatcher.grammar_from_regex(structured.regex))["grammars"][0]["lark_grammar"])
    if structured.grammar is not None:
        return grammar_from("grammar", structured.grammar)
    if structured.tool_calls is not None:
        return _tool_calls_lark(structured.tool_calls, is_special)
    return _json_lark(sound_schema(json.loads(structured.source)), structured)


def _tool_calls_lark(wanted: ToolCalls, is_special: Callable[[str], bool]) -> str:
    """Each schema is compiled as if it stood alone."""

    def json_rule(schema: str) -> str:
        return _lark(StructuredOutputs(json=schema), is_special).removeprefix("start: ")

    calls = [
        " ".join([*_literals(begin, is_special), json_rule(schema), *_literals(end, is_special)])
        for begin, schema, end in wanted.calls
    ]
    more = "" if wanted.separator is None else f" ({_quoted(wanted.separator)} call)*"
    answer = "" if wanted.answer is None else f" | {json_rule(wanted.answer)}"
    return f"start: call{more}{answer}\ncall: {' | '.join(calls)}\n"


def _literals(text: str, is_special: Callable[[str], bool]) -> list[str]:
    """A text in Lark. A tag in it that is a token of its own has no bytes for a grammar,
    so it has to be named."""
    pieces = [piece for piece in re.split(r"(<[^<>\s]+>)", text) if piece]
    return [
        f"({piece} | {_quoted(piece)})" if piece[0] == "<" and is_special(piece) else _quoted(piece)
        for piece in pieces
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_lark(schema: dict[str, Any], structured: StructuredOutputs) -> str:
    """The schema with its options inside: nothing in it may be ignored or weakened.

    Every string has one spelling, so that no key is another one once it is read.
    """
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
    if structured.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = _whitespace(structured.whitespace_pattern or DEFAULT_WHITESPACE)
    return f"start: %json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _whitespace(pattern: str) -> str:
    if not _BLANKS.fullmatch(pattern):
        raise RequestError(
            f"whitespace_pattern is {pattern!r}, but may be made of blanks, \\t, \\n, \\r, \\s, classes of "
            "them, "
            "groups and repetitions only: nothing else may stand between the tokens of JSON."
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _kind(structured: StructuredOutputs) -> str:
    if structured.json is not None or structured.json_object:
        return "JSON schema"
    if structured.tool_calls is not None:
        return "schema of a tool or answer"
    return (
        "regex" if structured.regex is not None else "grammar" if structured.grammar is not None else "choice"
    )


def _refusal(structured: StructuredOutputs, error: str) -> str:
    from llguidance import LLMatcher

    if structured.tool_calls is not None:
        # Of its schemas, the first that fails by itself has more to say.
        wanted = structured.tool_calls
        for schema in (*(schema for _, schema, _ in wanted.calls), wanted.answer):
            one = StructuredOutputs(json=schema or "{}")
            error_of_one = LLMatcher.validate_grammar(_lark(one, lambda text: False), limits=parser_limits())
            if error_of_one:
                return _refusal(one, error_of_one)
    kind = _kind(structured)
    place = _place_of_error(structured) if structured.json is not None else ""
    return f"The {kind} cannot be compiled{place}: {_short(error)}."


def _place_of_error(structured: StructuredOutputs) -> str:
    """ " at <path>" of an innermost schema that fails by itself; "" if none does."""
    from llguidance import LLMatcher

    root = sound_schema(json.loads(structured.source))
    shared = {"$defs": root["$defs"]} if "$defs" in root else {}
    limits, give_up = parser_limits(), time.monotonic() + SEARCH_SECONDS
    failing: list[str] = []
    for path, schema in subschemas(root):
        if time.monotonic() > give_up:
            break
        alone = _json_lark({**schema, **shared}, structured)
        if "$ref" not in schema and LLMatcher.validate_grammar(alone, limits=limits):
            failing.append(path)
    innermost = [
        path for path in failing if not any(other != path and other.startswith(path) for other in failing)
    ]
    return f" at {innermost[0]}" if innermost else ""


def _short(error: str) -> str:
    """The first line, and what a parser of expressions says it is about."""
    if "oneOf constraints are not supported" in error:
        return (
            "the alternatives of oneOf cannot be told apart: use anyOf, or require a property that is "
            "another const in "
            "each of them"
        )
    lines = [line.strip() for line in error.strip().splitlines()] or ["unknown error"]
    lines[0] = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", lines[0])
    reasons = [line.removeprefix("error:").strip() for line in lines[1:] if line.startswith("error:")]
    return ": ".join([lines[0].rstrip(":.")[:200], *(reason[:200] for reason in reasons[:1])])
