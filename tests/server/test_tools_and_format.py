"""Tools and response_format in one request: the answer is valid calls, or JSON that follows the format.

The judges are the official client's parse helpers and jsonschema on what random weights wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from minivllm.server.parsers.choose import CallsOrAnswer
from minivllm.server.parsers.events import CallStart, Content
from minivllm.server.parsers.tool_calls import HermesParser, LlamaParser
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "$defs": {"Side": {"enum": ["left", "right"]}},
            "properties": {"side": {"$ref": "#/$defs/Side"}},
            "required": ["side"],
            "additionalProperties": False,
        },
    },
}
WAIT: Any = {"type": "function", "function": {"name": "wait", "strict": True}}
WAIT["function"]["parameters"] = {
    "type": "object",
    "properties": {},
    "required": [],
    "additionalProperties": False,
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"side": "left"}}\n</tool_call>',
    "llama": '{"name": "look", "parameters": {"side": "left"}}',
}


class Report(BaseModel):
    """Begins as a call in Llama's form does."""

    name: Literal["look", "there <tool_call>"]
    seen: bool


REPORT = '{"name": "there <tool_call>", "seen": true}'


@pytest.fixture(scope="module", params=CALLS)
def server(request: pytest.FixtureRequest, word_tokenizer: Any) -> Iterator[ServedCore]:
    scripts = Scripts(word_tokenizer)
    scripts.tokenizer._fast.chat_template = TEMPLATE
    with served(ScriptedCore(scripts), scripts.tokenizer, tool_call_parser=request.param) as running:
        yield running


@pytest.fixture
def call(server: ServedCore) -> str:
    return CALLS[server.run.service.settings.tool_call_parser]


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say:{text}"}]


def parse(client: openai.OpenAI, stream: bool, text: str, **others: Any) -> Any:
    options = {
        "model": "scripted",
        "messages": say(text),
        "response_format": Report,
        "tools": [LOOK, WAIT],
        **others,
    }
    if not stream:
        return client.chat.completions.parse(**options).choices[0]
    with client.chat.completions.stream(**options) as events:
        return events.get_final_completion().choices[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_call_a_tool_or_answer_in_the_format(
    client: openai.OpenAI, call: str, stream: bool
) -> None:
    choice = parse(client, stream, call)
    assert choice.finish_reason == "tool_calls" and choice.message.parsed is None
    [made] = choice.message.tool_calls
    assert (made.function.name, made.function.parsed_arguments) == ("look", {"side": "left"})
    choice = parse(client, stream, REPORT)
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert choice.message.parsed == Report(name="there <tool_call>", seen=True)


def test_an_answer_streams_as_it_is_written(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "tools": [LOOK], "response_format": {"type": "json_schema"}}
    options["response_format"]["json_schema"] = {"name": "r", "schema": schema_of(Report)}
    chunks = list(client.chat.completions.create(messages=say(REPORT), stream=True, **options))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(pieces) == REPORT and len(pieces) > 5


def test_responses_parse_both_as_well(client: openai.OpenAI, call: str) -> None:
    tools: Any = [{"type": "function", **LOOK["function"]}]
    response = client.responses.parse(
        model="scripted", input=f"say:{REPORT}", text_format=Report, tools=tools
    )
    assert response.output_parsed == Report(name="there <tool_call>", seen=True)
    response = client.responses.parse(model="scripted", input=f"say:{call}", text_format=Report, tools=tools)
    [item] = response.output
    assert item.type == "function_call" and item.parsed_arguments == {"side": "left"}


def test_a_tool_that_must_be_called_leaves_no_answer_and_none_leaves_no_call(
    client: openai.OpenAI, server: ServedCore, call: str
) -> None:
    def structure() -> Any:
        return server.core.admitted[-1].sampling_params.structured_outputs

    assert parse(client, False, call, tool_choice="required").message.tool_calls
    assert structure().tool_calls.answer is None
    named = {"type": "function", "function": {"name": "look"}}
    assert parse(client, False, '{"side": "left"}', tool_choice=named).message.tool_calls
    assert json.loads(structure().json) == LOOK["function"]["parameters"]
    assert parse(client, False, REPORT, tool_choice="none").message.parsed is not None
    assert set(json.loads(structure().json)["properties"]) == {"name", "seen"}


def test_an_answer_that_could_be_a_call_is_refused(client: openai.OpenAI, server: ServedCore) -> None:
    """Only for models whose calls are bare JSON; a tag is no JSON, so nothing can be mistaken."""
    options: Any = {"model": "scripted", "messages": say("{}"), "tools": [LOOK]}
    answer = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}
    formats: list[Any] = [{"type": "json_object"}]
    formats.append({"type": "json_schema", "json_schema": {"name": "a", "schema": answer}})
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    formats.append({"type": "json_schema", "json_schema": {"name": "a", "schema": circle}})
    for wanted in formats:
        if server.run.service.settings.tool_call_parser == "hermes":
            assert (
                client.chat.completions.create(**options, response_format=wanted).choices[0].message.content
                == "{}"
            )
        else:
            with pytest.raises(openai.BadRequestError, match="additionalProperties to false"):
                client.chat.completions.create(**options, response_format=wanted)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return {**model.model_json_schema(), "additionalProperties": False}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_random_weights_write_valid_calls_and_valid_answers(real_client: openai.OpenAI, choice: Any) -> None:
    kinds = set()
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema_of(Report)}}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (LOOK, WAIT)}
    for seed in range(3):
        answer = real_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Well?"}],
            tools=[LOOK, WAIT],
            tool_choice=choice,
            response_format=wanted,
            parallel_tool_calls=seed != 0,
            n=4,
            seed=seed,
            max_tokens=150,
            temperature=1.0,
            # Whitespace between the tokens of JSON has no end of its own.
            extra_body={"bad_words": [" ", "\t", "\r"]},
        )
        for one in answer.choices:
            calls: Any = one.message.tool_calls or []
            if calls or one.finish_reason != "length":
                kinds.add("calls" if calls else "answer")
            for call in calls:
                arguments = call.function.arguments
                if one.finish_reason != "length":
                    jsonschema.validate(json.loads(arguments), schemas[call.function.name])
            assert seed != 0 or len(calls) <= 1
            if not calls and one.finish_reason != "length":
                jsonschema.validate(json.loads(one.message.content or ""), schema_of(Report))
    assert kinds == ({"calls", "answer"} if choice == "auto" else {"calls"})


PARSERS: dict[str, Callable[[], CallsOrAnswer]] = {
    "hermes": lambda: CallsOrAnswer(HermesParser, [HermesParser.form.begin("look")]),
    "llama": lambda: CallsOrAnswer(LlamaParser, [LlamaParser.form.begin("look")]),
}


@pytest.mark.parametrize("form", CALLS)
@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, 80), max_size=6), indent=st.none() | st.integers(0, 2))
def test_calls_are_told_from_answers_however_they_are_cut_and_spaced(
    form: str, cuts: list[int], indent: int | None
) -> None:
    def events(text: str) -> list[Any]:
        parser = PARSERS[form]()
        edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
        return [
            one for start, end in pairwise(edges) for one in parser.feed(text[start:end])
        ] + parser.finish()

    spaced = json.dumps(json.loads(CALLS["llama"]), indent=indent).replace("parameters", PARSER_KEYS[form])
    call = f"<tool_call>\n{spaced}\n</tool_call>" if form == "hermes" else spaced
    assert events(call)[0] == CallStart("look")
    for answer in (REPORT, '{"name": "look"', '{"name":"lo ok","parameters":{}}', "[]", "<tool_c"):
        found = events(answer)
        assert all(isinstance(event, Content) for event in found)
        assert "".join(event.text for event in found) == answer


PARSER_KEYS = {"hermes": "arguments", "llama": "parameters"}
