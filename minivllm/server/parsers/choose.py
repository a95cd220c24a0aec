"""Which parser an answer needs:
told by a flag, read off the chat template, or by the form that a grammar forced."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.errors import ConfigError
from minivllm.server.parsers.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
    PlainText,
)
from minivllm.server.parsers.reasoning import OPEN, ThinkParser
from minivllm.server.parsers.tool_calls import HERMES_OPEN, LLAMA_TAG, WHITESPACE, HermesParser, LlamaParser

NativeCalls = type[HermesParser] | type[LlamaParser]

TOOL_CALL_PARSERS: dict[str, NativeCalls] = {"hermes": HermesParser, "llama": LlamaParser}
REASONING_PARSERS = ("think",)


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes. tool_call_parser: a key of TOOL_CALL_PARSERS.
    has_reasoning: it thinks in ``<think>``."""

    tool_call_parser: str | None
    has_reasoning: bool

    @property
    def call_parser(self) -> NativeCalls | None:
        return None if self.tool_call_parser is None else TOOL_CALL_PARSERS[self.tool_call_parser]

    def parser(self, prompt: str | None, *, has_tools: bool) -> Parser:
        """A parser of one answer. prompt: the rendered conversation; it may end inside the reasoning."""
        parser: Parser = PlainText()
        if has_tools and self.call_parser is not None:
            parser = self.call_parser()
        if self.has_reasoning:
            parser = ThinkParser(parser, starts_inside=(prompt or "").rstrip().endswith(OPEN))
        return parser


def choose_answer_format(chat_template: str, tool_call_parser: str, reasoning_parser: str) -> AnswerFormat:
    """From the flags, which ``check_parsers`` knows, or where they say "auto" from the template."""
    tools = None if tool_call_parser == "none" else tool_call_parser
    if tools == "auto":
        is_llama = LLAMA_TAG in chat_template or (
            "tools" in chat_template and '"parameters"' in chat_template
        )
        tools = "hermes" if HERMES_OPEN in chat_template else "llama" if is_llama else None
    thinks = OPEN in chat_template if reasoning_parser == "auto" else reasoning_parser == "think"
    return AnswerFormat(tools, thinks)


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for a parser there is none of."""
    _known("tool_call_parser", tool_call_parser, tuple(TOOL_CALL_PARSERS))
    _known("reasoning_parser", reasoning_parser, REASONING_PARSERS)


def _known(name: str, value: str, parsers: tuple[str, ...]) -> None:
    allowed = ("auto", "none", *parsers)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.")


class NamedCallParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        begin: list[Event] = [] if self._texts else [CallStart(self._name)]
        self._texts.append(text)
        return [*begin, CallArguments(text)]

    def finish(self) -> list[Event]:
        text = "".join(self._texts)
        try:
            json.loads(text)
        except ValueError:
            return [CallBroken(text)] if text else []
        return [CallEnd()]


class CallsOrAnswer:
    """The whole text is calls, if it begins like one, or else an answer in which nothing is a call.

    begins: how calls begin; whitespace outside of strings makes no difference.
    """

    def __init__(self, make_calls_parser: Callable[[], Parser], begins: Sequence[str]) -> None:
        self._make_calls_parser = make_calls_parser
        self._begins = list(map(_compact, begins))
        self._buffer = ""
        self._parser: Parser | None = None

    def feed(self, text: str) -> list[Event]:
        if self._parser is None:
            self._buffer += text
            seen = _compact(self._buffer)
            if any(seen.startswith(begin) for begin in self._begins):
                self._parser = self._make_calls_parser()
            elif not any(begin.startswith(seen) for begin in self._begins):
                self._parser = PlainText()
            else:
                return []
            text, self._buffer = self._buffer, ""
        return self._parser.feed(text)

    def finish(self) -> list[Event]:
        if self._parser is not None:
            return self._parser.finish()
        return [Content(self._buffer)] if self._buffer else []


def _compact(text: str) -> str:
    """The beginning of a JSON text without the whitespace outside of its strings, none of which has an
    escaped quote: no call begins with such a string."""
    return re.sub(rf'("[^"]*"?)|[{WHITESPACE}]', r"\1", text)
