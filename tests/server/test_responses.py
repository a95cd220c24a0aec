"""/v1/responses as the official client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.serving import ServedCore

QUESTION: Any = [{"role": "user", "content": "say:well"}]


def test_a_response_carries_the_text_and_its_settings(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", instructions="Be brief.", input="say:Hello.", temperature=0.5, metadata={"run": "7"}
    )
    assert response.output_text == "Hello."
    assert (response.status, response.temperature, response.metadata) == ("completed", 0.5, {"run": "7"})
    assert response.instructions == "Be brief."
    assert response.usage is not None and response.usage.output_tokens > 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_events_of_a_stream_tell_the_same_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="scripted", input="say:one two three", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 10
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "one two three"
    )
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "one two three"


def test_the_clients_own_stream_helper_collects_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="say:one two") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "one two"


def test_the_length_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="say:one two three", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_nothing_is_kept_and_the_answer_says_so(client: openai.OpenAI) -> None:
    """The client's own default is to store; what only works with a store is refused when it is asked for."""
    response = client.responses.create(model="scripted", input="say:x", store=True)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported here"):
        client.responses.create(model="scripted", input="say:x", previous_response_id=response.id)


def test_the_output_of_a_function_may_come_in_parts(client: openai.OpenAI, server: ServedCore) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "name": "f"}
    parts: Any = [{"type": "input_text", "text": "four"}, {"type": "input_text", "text": "five"}]
    items: Any = [{"role": "user", "content": "go"}, call, {**output, "output": parts}, *QUESTION]
    assert client.responses.create(model="scripted", input=items).output_text == "well"
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert "four\nfive" in prompt
    items[2]["output"] = [{"type": "input_image", "image_url": "data:,"}]
    with pytest.raises(openai.BadRequestError, match="at most 0 images") as raised:
        client.responses.create(model="scripted", input=items)
    assert raised.value.param == "input.2.output.0"


def test_items_become_the_turns_of_a_conversation(client: openai.OpenAI, server: ServedCore) -> None:
    first = client.responses.create(model="scripted", input=[{"role": "user", "content": "say:first"}])
    turns: Any = [{"role": "user", "content": "say:first"}]
    turns += [item.model_dump() for item in first.output]
    turns += [{"role": "user", "content": [{"type": "input_text", "text": "say:second"}]}]
    assert client.responses.create(model="scripted", input=turns).output_text == "second"
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert prompt.count("<|im_start|>") == 4
    assert "<|im_start|>assistant\nfirst<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "unheard_of"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ],
)
def test_what_needs_a_memory_or_is_unknown_is_refused_by_name(
    client: openai.OpenAI, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "scripted", "input": "say:x", **given})
    assert caught.value.param == param


def test_tools_that_the_server_cannot_run_are_left_out(client: openai.OpenAI, server: ServedCore) -> None:
    """Coding agents send them with every request; the model is not told of them."""
    kinds = ("web_search", "local_shell", "image_generation")
    tools: Any = [{"type": kind, "external_web_access": False} for kind in kinds]
    response = client.responses.create(
        model="scripted",
        input="say:fine",
        tools=tools,
        tool_choice="auto",
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert response.output_text == "fine"
    assert [tool.type for tool in response.tools] == list(kinds)
    prompt = server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)
    assert not any(kind in prompt for kind in kinds)


def test_items_of_other_servers_answers_can_be_sent_back(client: openai.OpenAI) -> None:
    items: Any = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "abc"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
        *QUESTION,
    ]
    assert client.responses.create(model="scripted", input=items).output_text == "well"


def test_a_conversation_that_is_too_long_can_lose_its_oldest_turns(
    client: openai.OpenAI, server: ServedCore
) -> None:
    """The instructions stay, and no result of a call stays without the call."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "r" * 1500}
    old = [
        {"role": role, "content": f"turn {turn} " * 80}
        for turn in range(30)
        for role in ("user", "assistant")
    ]
    items: Any = [*old, {"role": "user", "content": "call it"}, call, result, *QUESTION]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input=items, instructions="Be brief.")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    response = client.responses.create(
        model="scripted", input=items, instructions="Be brief.", truncation="auto", max_output_tokens=900
    )
    assert (response.output_text, response.truncation) == ("well", "auto")
    request = server.core.admitted[-1]
    assert len(request.prompt_token_ids) <= 4096 - 900
    prompt = server.run.service.engine.tokenizer.decode(request.prompt_token_ids, False)
    assert "Be brief." in prompt and "turn 0 " not in prompt and "say:well" in prompt
    alone: Any = [{"role": "user", "content": "x " * 9000}]
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.responses.create(model="scripted", input=alone, truncation="auto")


def test_log_probabilities_come_with_the_text_they_are_of(client: openai.OpenAI) -> None:
    settings: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(model="scripted", input="say:one two", **settings)
    [item] = response.output
    assert item.type == "message" and item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs is not None
    assert "".join(one.token for one in logprobs).startswith("one two")
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    events = list(client.responses.create(model="scripted", input="say:one two", stream=True, **settings))
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in told] == [one.token for one in logprobs][: len(told)]
