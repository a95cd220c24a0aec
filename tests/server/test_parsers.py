"""Taking a model's text apart: any cut of it into deltas gives the same pieces, and nothing gets lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import ConfigError
from minivllm.server.parsers.choose import choose_answer_format
from minivllm.server.parsers.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
    PlainText,
    Reasoning,
)
from minivllm.server.parsers.reasoning import ThinkParser
from minivllm.server.parsers.tool_calls import HermesParser, LlamaParser
from minivllm.server.service.settings import ServerSettings

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama": LlamaParser,
    "think": lambda: ThinkParser(PlainText(), starts_inside=False),
    "think, opened by the prompt": lambda: ThinkParser(PlainText(), starts_inside=True),
    "think and hermes": lambda: ThinkParser(HermesParser(), starts_inside=False),
}
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"x": [1, "}"]}}',
    '{"name": "g", "parameters": {}}',
    '{"arguments": "{\\"a\\": \\"\\\\n\\"}", "name": "h"}',
    '{"name": "no arguments"}',
    '{"name": 3, "arguments": tru',
    *'{}[]":,;\\ \n<n1é',
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3)),
    min_size=1,
    max_size=4,
)


def parse(parser: Parser, deltas: list[str]) -> list[Event]:
    """All events, neighbours of the same kind joined."""
    events: list[Event] = [event for delta in deltas for event in parser.feed(delta)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(last.text + event.text)
        else:
            joined.append(event)
    return joined


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    """(name, arguments) of every call."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(cut=cut_texts())
def test_any_cut_of_the_text_gives_the_same_pieces(name: str, cut: tuple[str, list[str]]) -> None:
    text, deltas = cut
    whole = parse(PARSERS[name](), [text])
    assert parse(PARSERS[name](), deltas) == whole
    assert parse(PARSERS[name](), list(text)) == whole


@pytest.mark.parametrize("name", ["hermes", "llama"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_text_without_a_call_comes_out_unchanged(name: str, text: str) -> None:
    events = parse(PARSERS[name](), [text])
    if not calls_of(events):
        assert content_of(events) == text


@settings(max_examples=100, deadline=None)
@given(
    calls=CALLS, indent=st.none() | st.integers(0, 2), arguments_first=st.booleans(), as_string=st.booleans()
)
def test_hermes_calls_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], indent: int | None, arguments_first: bool, as_string: bool
) -> None:
    text = "Let me look.\n"
    for name, arguments in calls:
        value = json.dumps(arguments) if as_string else arguments
        entries: list[tuple[str, object]] = [("name", name), ("arguments", value)]
        body = json.dumps(dict(entries[::-1] if arguments_first else entries), indent=indent)
        text += f"<tool_call>\n{body}\n</tool_call>\n"
    events = parse(HermesParser(), list(text))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert events.count(CallEnd()) == len(calls)
    assert content_of(events) == "Let me look."


@settings(max_examples=100, deadline=None)
@given(calls=CALLS, has_tag=st.booleans(), separator=st.sampled_from(["; ", ";", "\n", " , "]))
def test_llama_calls_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], has_tag: bool, separator: str
) -> None:
    bodies = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    text = ("<|python_tag|>" if has_tag else "") + separator.join(bodies)
    events = parse(LlamaParser(), [text])
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"nom": "f"}</tool_call>'),
        ("hermes", "<tool_call>f(x)</tool_call>"),
        ("hermes", "2 <tool_call"),
        ("llama", '{"temperature": 21}'),
        ("llama", '{"name": "Ada", "age": 36}'),
        ("llama", 'The call is {"name": "f", "parameters": {}}'),
        ("llama", "<|python_tag|>print(1)"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    events = parse(PARSERS[name](), list(text))
    assert calls_of(events) == []
    assert content_of(events) == text


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"city": ')
    assert parser.feed('"Par') == [CallArguments('"Par')]
    assert parser.feed('is"}') == [CallArguments('is"}')]


def test_a_call_cut_off_by_the_length_keeps_the_arguments_it_has() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": "Par'
    events = parse(HermesParser(), [text])
    assert events == [CallStart("f"), CallArguments('{"city": "Par'), CallBroken(text)]


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.\n", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>cut off", False, "cut off", ""),
        ("No <think>tag at the start</think>", False, "", "No <think>tag at the start</think>"),
        ("<thin", False, "", "<thin"),
        ("<think></think>Yes.", False, "", "Yes."),
    ],
)
def test_reasoning_is_told_from_the_answer(
    text: str, starts_inside: bool, reasoning: str, content: str
) -> None:
    events = parse(ThinkParser(PlainText(), starts_inside=starts_inside), list(text))
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    assert content_of(events) == content


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("piece", ["<", "<tool_call", '{"a":', "\n ", "<think", "</thin", "[", '"\\'])
def test_no_more_than_the_beginning_of_a_tag_is_looked_at_again(name: str, piece: str) -> None:
    """What a delta makes the parser read is the delta and a remainder shorter than a tag,
    so the work is linear."""
    parser = PARSERS[name]()
    for _ in range(200):
        parser.feed(piece)
        inner = getattr(parser, "_inner", parser)
        assert len(getattr(parser, "_buffer", "")) + len(getattr(inner, "_buffer", "")) < 2 * len(
            "<|python_tag|>"
        )


def test_the_chat_template_tells_the_parsers() -> None:
    qwen = choose_answer_format("{{ tools }} <tool_call> … <think>", "auto", "auto")
    assert (qwen.tool_call_parser, qwen.has_reasoning) == ("hermes", True)
    llama = choose_answer_format('{% if tools %}{"name": …, "parameters": …}', "auto", "auto")
    assert (llama.tool_call_parser, llama.has_reasoning) == ("llama", False)
    assert choose_answer_format("{{ messages }}", "auto", "auto").tool_call_parser is None
    assert choose_answer_format("<tool_call>", "llama", "think").tool_call_parser == "llama"


@pytest.mark.parametrize(
    ("name", "known"),
    [("tool_call_parser", "auto, none, hermes, llama"), ("reasoning_parser", "auto, none, think")],
)
def test_an_unknown_parser_is_refused_before_a_model_is_loaded(name: str, known: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'mistral', but must be one of {known}"):
        ServerSettings(**{name: "mistral"})
