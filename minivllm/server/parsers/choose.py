"""Which parsers a model needs: told by a flag, or read off its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.errors import ConfigError
from minivllm.server.parsers.events import Parser, PlainText
from minivllm.server.parsers.reasoning import OPEN, ThinkParser
from minivllm.server.parsers.tool_calls import HERMES_OPEN, LLAMA_TAG, HermesParser, LlamaParser

NativeCalls = type[HermesParser] | type[LlamaParser]

TOOL_CALL_PARSERS: dict[str, NativeCalls] = {"hermes": HermesParser, "llama": LlamaParser}
REASONING_PARSERS = ("think",)


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes. tool_call_parser: a key of TOOL_CALL_PARSERS. has_reasoning: it thinks in ``<think>``."""

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
    """From the flags, or where they say "auto" from the template. Raises ConfigError for a parser there is none of."""
    _known("tool_call_parser", tool_call_parser, tuple(TOOL_CALL_PARSERS))
    _known("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    tools = None if tool_call_parser == "none" else tool_call_parser
    if tools == "auto":
        tools = _tool_call_parser_of(chat_template)
    thinks = OPEN in chat_template if reasoning_parser == "auto" else reasoning_parser == "think"
    return AnswerFormat(tools, thinks)


def _tool_call_parser_of(chat_template: str) -> str | None:
    if HERMES_OPEN in chat_template:
        return "hermes"
    if LLAMA_TAG in chat_template or ("tools" in chat_template and '"parameters"' in chat_template):
        return "llama"
    return None


def _known(name: str, value: str, parsers: tuple[str, ...]) -> None:
    allowed = ("auto", "none", *parsers)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.")
