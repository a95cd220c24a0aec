"""Tool calls, reasoning and structured answers through the official client,
with a template that knows tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}{% endfor %} <tool_call></tool_call> <think><|im_end|>
{% endif -%}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


@pytest.fixture(scope="module")
def server(word_tokenizer: Path) -> Iterator[ServedCore]:
    scripts = Scripts(word_tokenizer)
    scripts.tokenizer._fast.chat_template = TEMPLATE
    with served(ScriptedCore(scripts), scripts.tokenizer) as running:
        yield running


def ask(client: openai.OpenAI, text: str, **others: Any) -> Any:
    messages = [{"role": "user", "content": f"say:{text}"}]
    return client.chat.completions.create(model="scripted", messages=messages, **others)  # type: ignore[call-overload]


def test_a_tool_loop_goes_round(client: openai.OpenAI, server: ServedCore) -> None:
    messages: list[Any] = [{"role": "user", "content": f"say:I look. {CALL}{CALL}"}]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
    assert len({call.id for call in calls}) == 2
    messages.append(choice.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    messages.append({"role": "user", "content": "say:It is sunny."})
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert (
        "The weather in a city." in prompt and "<tool_call>Paris</tool_call>" in prompt and "sunny" in prompt
    )


def test_streamed_calls_add_up_to_the_same(client: openai.OpenAI) -> None:
    calls: dict[int, list[str]] = {}
    num_argument_deltas = 0
    reasons = []
    for chunk in ask(client, CALL + CALL, tools=[WEATHER], stream=True):
        [choice] = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for delta in choice.delta.tool_calls or []:
            if delta.id is not None:
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments
            num_argument_deltas += bool(delta.function.arguments)
    assert calls == {0: ["get_weather", '{"city": "Paris"}'], 1: ["get_weather", '{"city": "Paris"}']}
    assert num_argument_deltas > 4
    assert reasons == ["tool_calls"]


def test_one_call_at_a_time_ends_the_answer_with_the_first(client: openai.OpenAI, server: ServedCore) -> None:
    for stream in (False, True):
        answer = ask(client, CALL + CALL, tools=[WEATHER], parallel_tool_calls=False, stream=stream)
        if stream:
            deltas = [delta for chunk in answer for delta in chunk.choices[0].delta.tool_calls or []]
            assert {delta.index for delta in deltas} == {0}
            server.wait_until(lambda: not server.core.running)
            registry = server.run.service.metrics.registry
            assert not registry.get_sample_value(
                "minivllm_request_success_total", {"finished_reason": "abort"}
            )
        else:
            assert len(answer.choices[0].message.tool_calls) == 1


def test_without_tools_or_with_none_a_call_is_text(client: openai.OpenAI) -> None:
    for others in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = ask(client, CALL, **others).choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)


def test_reasoning_is_kept_apart(client: openai.OpenAI) -> None:
    message = ask(client, "<think>\nHm.</think>\n\nYes.").choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    response = client.responses.create(model="scripted", input="say:<think>Hm.</think>Yes.")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "Yes."
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_responses_tell_calls_as_items(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": None}
    with client.responses.stream(model="scripted", input=f"say:{CALL}", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        [item] = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert item.type == "function_call"
    assert (item.name, item.arguments) == ("get_weather", '{"city": "Paris"}')
    back: Any = [
        {"role": "user", "content": "say:x"},
        item.model_dump(exclude_unset=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"},
        {"role": "user", "content": "say:done"},
    ]
    assert "parsed_arguments" in back[1]  # the client's own helper put it there
    assert client.responses.create(model="scripted", input=back, tools=[tool]).output_text == "done"


def test_a_named_tool_forces_its_arguments(client: openai.OpenAI, server: ServedCore) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    [call] = (
        ask(client, '{"city": "Rome"}', tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
    )
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and json.loads(structured.json) == WEATHER["function"]["parameters"]
    with pytest.raises(openai.BadRequestError, match="tools has only get_weather"):
        ask(client, "x", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "other"}})
    with pytest.raises(openai.BadRequestError, match="tools is empty"):
        ask(client, "x", tool_choice="required")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_inside_of_which_the_answer_stops_is_no_call(client: openai.OpenAI, choice: Any) -> None:
    """Neither a stop string nor an early end of the sequence makes broken arguments a client would run."""
    written = '{"city": "Paris END"}' if isinstance(choice, dict) else CALL.replace("Paris", "Paris END")
    whole = "" if isinstance(choice, dict) else CALL
    for text, stop in ((written, ["END"]), (written.partition("END")[0], None)):
        answer = ask(client, whole + text, tools=[WEATHER], tool_choice=choice, stop=stop).choices[0]
        assert answer.finish_reason == "stop"
        assert [call.function.arguments for call in answer.message.tool_calls or ()] == [
            '{"city": "Paris"}'
        ] * bool(whole)
        assert answer.message.content == text.partition("END")[0]
        streamed = ask(client, whole + text, tools=[WEATHER], tool_choice=choice, stop=stop, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in streamed][-1] == "stop"
    if choice == "auto":
        tool: Any = {"type": "function", **WEATHER["function"], "strict": None}
        response = client.responses.create(
            model="scripted", input=f"say:{written}", tools=[tool], extra_body={"stop": ["END"]}
        )
        assert [item.status for item in response.output] == ["incomplete"]  # type: ignore[union-attr]


def test_a_call_that_the_client_named_ends_with_stop(client: openai.OpenAI) -> None:
    """OpenAI's finish reason: calling that tool was no choice of the model."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for others in ({}, {"parallel_tool_calls": False}):
        [choice] = ask(client, '{"city": "Rome"}', tools=[WEATHER], tool_choice=named, **others).choices
        assert (choice.finish_reason, len(choice.message.tool_calls)) == ("stop", 1)


def test_required_tools_force_calls_as_the_model_writes_them(
    client: openai.OpenAI, server: ServedCore
) -> None:
    """The judge is jsonschema, on the arguments behind the references that moved."""
    import jsonschema

    written = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("get_weather", '{"city": "Rome"}'), ("nested", '{"at": {"x": 1}}'))
    )
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    nested = {"$defs": {"Point": point}, "type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "nested", "parameters": nested}}]
    for stream in (False, True):
        answer = ask(client, written, tools=tools, tool_choice="required", stream=stream)
        if not stream:
            calls = answer.choices[0].message.tool_calls
            assert [call.function.arguments for call in calls] == ['{"city": "Rome"}', '{"at": {"x": 1}}']
        else:
            deltas = [delta for chunk in answer for delta in chunk.choices[0].delta.tool_calls or []]
            assert "".join(delta.function.arguments for delta in deltas) == '{"city": "Rome"}{"at": {"x": 1}}'
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert (
        structured is not None and structured.tool_calls is not None and structured.tool_calls.answer is None
    )
    [_, (_, schema, _)] = structured.tool_calls.calls
    jsonschema.validate({"name": "nested", "arguments": {"at": {"x": 1}}}, json.loads(schema))
    for wrong in ({}, {"name": "x", "arguments": {}}, {"name": "nested", "arguments": {"at": {"x": "1"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json.loads(schema))


PATCH: Any = {"name": "apply_patch", "description": "Edits files."}
PATCH_CALL = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+é\\n"}}\n</tool_call>'
PATCH_INPUT = "*** Begin\n+é\n"


def test_a_custom_tool_gets_its_text(client: openai.OpenAI, server: ServedCore) -> None:
    """On both endpoints, streamed or not, and its call may be sent back."""
    tools = [{"type": "custom", "custom": PATCH}, WEATHER]
    for choice in ("auto", "required"):
        [answer] = ask(client, PATCH_CALL, tools=tools, tool_choice=choice).choices
        [call] = answer.message.tool_calls
        assert (answer.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "apply_patch")
        assert call.custom.input == PATCH_INPUT
    named = {"type": "custom", "custom": {"name": "apply_patch"}}
    [call] = (
        ask(client, json.dumps({"input": "x"}), tools=tools, tool_choice=named).choices[0].message.tool_calls
    )
    assert call.custom.input == "x"
    deltas = [
        delta.model_dump(exclude_none=True)
        for chunk in ask(client, PATCH_CALL, tools=tools, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(delta["custom"]["input"] for delta in deltas) == PATCH_INPUT
    back: Any = [
        {"role": "user", "content": "Edit."},
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
        {"role": "user", "content": "say:good"},
    ]
    again = client.chat.completions.create(model="scripted", messages=back, tools=tools)  # type: ignore[arg-type]
    assert again.choices[0].message.content == "good"


def test_responses_tell_calls_of_custom_tools_as_items(client: openai.OpenAI, server: ServedCore) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    tool: Any = {"type": "custom", **PATCH, "format": grammar}
    with client.responses.stream(model="scripted", input=f"say:{PATCH_CALL}", tools=[tool]) as stream:
        events = list(stream)
        [item] = stream.get_final_response().output
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert "Edits files." in prompt and "start: /x+/" in prompt
    assert item.type == "custom_tool_call" and (item.name, item.input) == ("apply_patch", PATCH_INPUT)
    told = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(told) == PATCH_INPUT
    back: Any = [
        {"role": "user", "content": "say:x"},
        item.model_dump(exclude_unset=True),
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"},
        {"role": "user", "content": "say:good"},
    ]
    chosen: Any = {"type": "custom", "name": "apply_patch"}
    assert client.responses.create(model="scripted", input=back, tools=[tool]).output_text == "good"
    [item] = client.responses.create(
        model="scripted", input='say:{"input": "y"}', tools=[tool], tool_choice=chosen
    ).output
    assert item.type == "custom_tool_call" and item.input == "y"


def test_only_allowed_tools_are_offered(client: openai.OpenAI, server: ServedCore) -> None:
    other = {"type": "function", "function": {"name": "other", "description": "The other one."}}
    named = [{"type": "function", "function": {"name": "get_weather"}}]

    def choice(mode: str, tools: Any) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    answer = ask(client, CALL, tools=[WEATHER, other], tool_choice=choice("auto", named))
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert "The weather" in prompt and "The other one" not in prompt
    ask(client, CALL, tools=[WEATHER, other], tool_choice=choice("required", named))
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and len(structured.tool_calls.calls) == 1
    tools: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, other)]
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "other"}],
    }
    client.responses.create(model="scripted", input=f"say:{CALL}", tools=tools, tool_choice=allowed)
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and "other" in structured.tool_calls.calls[0][1]
    with pytest.raises(openai.BadRequestError, match="tools has only other"):
        ask(client, "x", tools=[other], tool_choice=choice("auto", named))


@pytest.mark.parametrize("max_tokens", range(14, 40, 5))
def test_a_call_that_was_cut_can_be_sent_back(
    client: openai.OpenAI, server: ServedCore, max_tokens: int
) -> None:
    """With what the tool said to it; the model sees as much of the arguments as there is."""
    tool: Any = {"type": "function", **WEATHER["function"], "strict": None}
    long = CALL.replace("Paris", "Paris by the Seine in France, which is in Europe")
    first = client.responses.create(
        model="scripted", input=f"say:{long}", tools=[tool], max_output_tokens=max_tokens + 20
    )
    [item] = first.output
    assert first.status == item.status == "incomplete"
    if item.type != "function_call":
        return
    back: Any = [
        {"role": "user", "content": "Weather?"},
        item.model_dump(exclude_unset=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "The arguments were cut off."},
        {"role": "user", "content": "say:again"},
    ]
    assert client.responses.create(model="scripted", input=back, tools=[tool]).output_text == "again"
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    [seen] = re.findall("<tool_call>(.*)</tool_call>\n*<", prompt)
    assert "Paris by the Seine in France, which is in Europe".startswith(seen) and seen in item.arguments


ARGUMENTS = st.dictionaries(
    st.sampled_from("abc"), st.integers() | st.lists(st.sampled_from(['é"', "\U0001f600", 1.5]))
)


@settings(max_examples=60, deadline=None)
@given(arguments=ARGUMENTS, cut=st.floats(0, 1), ascii=st.booleans())
def test_any_beginning_of_arguments_is_an_object_for_the_template(
    arguments: dict[str, Any], cut: float, ascii: bool
) -> None:
    from minivllm.server.answers.chat_messages import template_messages
    from minivllm.server.protocol.chat import AssistantMessage, FunctionToolCall

    whole = json.dumps(arguments, ensure_ascii=ascii)

    def seen(text: str) -> Any:
        call = FunctionToolCall(id="c", function={"name": "f", "arguments": text})
        [message] = template_messages([AssistantMessage(role="assistant", tool_calls=[call])], "")
        return message["tool_calls"][0]["function"]["arguments"]

    assert seen(whole) == arguments
    assert set(seen(whole[: round(cut * len(whole))])) <= set(arguments)
    assert seen("{'city': 'Rome'}") == "{'city': 'Rome'}"  # not JSON, but what the model wrote


def test_a_real_engine_writes_what_the_clients_parse_helper_reads(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Random weights, so only the grammar can have made it valid."""
    import asyncio

    from minivllm.config import EngineArgs
    from minivllm.frontend.async_llm import AsyncLLM
    from tests.server.serving import serve_in_thread

    args = EngineArgs(
        model=str(tiny_model("llama")), enforce_eager=True, max_model_len=512, num_gpu_blocks_override=40
    )
    with serve_in_thread(lambda: AsyncLLM.from_args(args)) as running:

        async def main() -> list[Verdict | None]:
            async with openai.AsyncOpenAI(
                base_url=f"{running.url}/v1", api_key="unused", max_retries=0
            ) as client:

                async def one(seed: int) -> Verdict | None:
                    answer = await client.chat.completions.parse(
                        model=args.model,
                        messages=[{"role": "user", "content": "Is it?"}],
                        response_format=Verdict,
                        seed=seed,
                        # Whitespace between the tokens of JSON has no end of its own.
                        extra_body={"bad_words": ["\n", " ", "\t", "\r"]},
                    )
                    return answer.choices[0].message.parsed

                return await asyncio.gather(*(one(seed) for seed in range(4)))

        assert all(isinstance(verdict, Verdict) for verdict in asyncio.run(main()))
