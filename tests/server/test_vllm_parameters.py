"""vLLM's parameters beyond OpenAI's, sent by its users:
what each does to the prompt, the answer or the stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.server.serving import RealServer, ScriptedCore, Scripts, ServedCore, served

TEMPLATE = """{% if enable_thinking is defined and not enable_thinking %}quiet {% endif -%}
{% for document in documents or [] %}[{{ document.text }}]{% endfor -%}
{% for tool in tools or [] %}{{ tool.function.name }};{% endfor -%}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER: dict[str, Any] = {"role": "user", "content": "say:fine"}


@pytest.fixture(scope="module")
def server(word_tokenizer: Path) -> Iterator[ServedCore]:
    scripts = Scripts(word_tokenizer)
    scripts.tokenizer._fast.chat_template = TEMPLATE
    with served(ScriptedCore(scripts), scripts.tokenizer, trust_request_chat_template=True) as running:
        yield running


def post(server: Any, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def chat(server: ServedCore, status: int = 200, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", {"messages": [USER], **fields}, status)


def stream(server: ServedCore, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = httpx.post(f"{server.url}{path}", json={**body, "stream": True}, timeout=60).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def prompt_of(server: ServedCore) -> str:
    return server.run.service.engine.tokenizer.decode(server.core.admitted[-1].prompt_token_ids, False)


@pytest.mark.parametrize("content", ["say:It is ", "say:It <b>is</b>", "  say:x\n\nsay:y  "])
def test_the_last_message_is_gone_on_with(server: ServedCore, content: str) -> None:
    """The judge is transformers' own continue_final_message."""
    messages = [USER, {"role": "assistant", "content": content}]
    for fields in ({}, {"add_generation_prompt": False}):
        chat(server, messages=messages, continue_final_message=True, **fields)
        theirs = server.run.service.engine.tokenizer._fast.apply_chat_template(
            messages, continue_final_message=True, tokenize=False
        )
        assert prompt_of(server) == theirs
    error = chat(server, 400, messages=messages, continue_final_message=True, add_generation_prompt=True)[
        "error"
    ]
    assert error["param"] == "continue_final_message"


def test_echo_begins_the_answer_with_the_last_message(server: ServedCore) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "say:It is"}], "echo": True}
    body["continue_final_message"] = True
    whole = chat(server, **body)["choices"][0]["message"]["content"]
    assert whole == "say:It isIt is"
    chunks = stream(server, "/v1/chat/completions", body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    assert chat(server, echo=True)["choices"][0]["message"]["content"] == "fine"


def test_templates_documents_and_switches_of_thinking_reach_the_prompt(
    server: ServedCore, scripts: Scripts
) -> None:
    chat(server, documents=[{"text": "one"}, {"text": "two"}])
    assert prompt_of(server).startswith("[one][two]<|im_start|>")
    for switch in ({"enable_thinking": False}, {"think": False}, {"reasoning_effort": "none"}):
        chat(server, **switch)
        assert prompt_of(server).startswith("quiet "), switch
    chat(server, think=True)
    assert not prompt_of(server).startswith("quiet ")
    chat(server, chat_template="<|im_start|>mine {{ messages[0].content }}<|im_end|>")
    assert prompt_of(server) == "<|im_start|>mine say:fine<|im_end|>"
    assert server.core.admitted[-1].prompt_token_ids[0] == scripts.tokenizer.backend.token_to_id(
        "<|im_start|>"
    )


def test_a_request_brings_a_template_only_where_the_operator_allows_it(scripts: Scripts) -> None:
    with served(ScriptedCore(scripts), scripts.tokenizer) as running:
        error = chat(running, 400, chat_template="{{ 1 }}")["error"]
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]


def test_tokenize_counts_a_conversation_as_the_chat_reads_it(server: ServedCore) -> None:
    tool = {"type": "function", "function": {"name": "look_it_up"}}
    for fields in (
        {"tools": [tool]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"documents": [{"text": "d"}]},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"tools": []},
    ):
        chat(server, **fields)
        counted = post(server, "/tokenize", {"messages": [USER], **fields})
        assert counted["tokens"] == server.core.admitted[-1].prompt_token_ids, fields


def test_token_ids_of_prompt_and_answer_are_told(server: ServedCore, scripts: Scripts) -> None:
    expected = [*scripts.tokenizer.encode("fine", False), 1]
    answer = chat(server, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["prompt_token_ids"] == server.core.admitted[-1].prompt_token_ids
    chunks = stream(server, "/v1/chat/completions", {"messages": [USER], "return_token_ids": True})
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        answer["prompt_token_ids"]
    ]
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", ())] == expected
    text = {"prompt": "say:fine", "return_token_ids": True}
    choice = post(server, "/v1/completions", text)["choices"][0]
    assert (
        choice["prompt_token_ids"] == scripts.tokenizer.encode("say:fine") and choice["token_ids"] == expected
    )
    chunks = stream(server, "/v1/completions", text)
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", ())] == expected


def test_log_probabilities_of_the_prompt_are_told_by_token_ids(server: ServedCore) -> None:
    answer = chat(server, prompt_logprobs=2)
    ids = server.core.admitted[-1].prompt_token_ids
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token_id, position in zip(ids[1:], others):
        assert position[str(token_id)]["logprob"] == -2.0 and position[str(token_id)]["rank"] == 2
        assert len(position) == 2
    choice = post(server, "/v1/completions", {"prompt": "say:fine", "prompt_logprobs": 0})["choices"][0]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"][1]) == 1
    assert chat(server, 400, prompt_logprobs=1, stream=True)["error"]["param"] == "prompt_logprobs"


def test_a_prompt_can_be_cut_to_its_last_tokens(server: ServedCore, scripts: Scripts) -> None:
    whole = scripts.tokenizer.encode("a b c d e f say:fine")
    for path, body in (
        ("/v1/completions", {"prompt": "a b c d e f say:fine"}),
        ("/v1/completions", {"prompt": whole}),
        ("/v1/embeddings", {"input": whole}),
    ):
        post(server, path, {**body, "truncate_prompt_tokens": 6})
        assert server.core.admitted[-1].prompt_token_ids == whole[-6:]
    assert chat(server, 400, truncate_prompt_tokens=0)["error"]["param"] == "truncate_prompt_tokens"
    chat(server, truncate_prompt_tokens=5)
    assert len(server.core.admitted[-1].prompt_token_ids) == 5
    post(server, "/v1/completions", {"prompt": [5] * 9000, "truncate_prompt_tokens": -1, "max_tokens": 96})
    assert len(server.core.admitted[-1].prompt_token_ids) == 4000
    post(server, "/v1/embeddings", {"input": [5] * 9000, "truncate_prompt_tokens": -1})
    assert len(server.core.admitted[-1].prompt_token_ids) == 4096


def test_reasoning_can_be_left_out(server: ServedCore) -> None:
    body = {
        "messages": [{"role": "user", "content": "say:<think>Hm.</think>Yes."}],
        "include_reasoning": False,
    }
    server.run.service.answer_format = type(server.run.service.answer_format)(None, True)
    message = chat(server, **body)["choices"][0]["message"]
    assert message["content"] == "Yes." and "reasoning" not in message and "reasoning_content" not in message
    body["include_reasoning"] = True
    message = chat(server, **body)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."


def test_every_chunk_can_count_tokens(server: ServedCore) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, "/v1/chat/completions", {"messages": [USER], "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and chunks[-1]["choices"] == []


def test_names_of_requests_and_budgets_are_taken(server: ServedCore) -> None:
    answer = chat(server, request_id="mine-7", thinking_token_budget=9)
    assert answer["id"] == "chatcmpl-mine-7"
    assert server.core.admitted[-1].sampling_params.thinking_budget == 9
    assert chat(server, 400, request_id="not a name")["error"]["param"] == "request_id"


def test_special_tokens_around_a_text_can_be_left_out(server: ServedCore, scripts: Scripts) -> None:
    post(server, "/v1/completions", {"prompt": "say:fine", "add_special_tokens": False})
    assert server.core.admitted[-1].prompt_token_ids == scripts.tokenizer.encode("say:fine", False)


def test_completions_of_texts_keep_to_a_response_format(real_server: RealServer) -> None:
    """Random weights, so only the format can have made it valid; true is the schema of any value."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"prompt": [5, 6], "max_tokens": 60, "response_format": form, "bad_words": ["\n", " ", "\t", "\r"]}
    jsonschema.validate(json.loads(post(real_server, "/v1/completions", body)["choices"][0]["text"]), schema)
    anything = {"type": "json_schema", "json_schema": {"name": "s", "schema": True}}
    assert post(real_server, "/v1/completions", {**body, "response_format": anything})["choices"]
    nothing = {"type": "json_schema", "json_schema": {"name": "s", "schema": False}}
    error = post(real_server, "/v1/completions", {**body, "response_format": nothing}, 400)["error"]
    assert error["param"] == "response_format.json_schema.schema"


def test_documents_are_ranked_by_their_likeness_to_a_query(real_server: RealServer) -> None:
    """The judge is /v1/score."""
    documents = ["one two", "three", "a query", "four five six"]
    scores = post(real_server, "/v1/score", {"text_1": "a query", "text_2": documents})["data"]
    wanted = sorted(((one["score"], one["index"]) for one in scores), reverse=True)
    ranked = post(real_server, "/v1/rerank", {"query": "a query", "documents": documents, "top_n": 3})[
        "results"
    ]
    assert [one["index"] for one in ranked] == [index for _, index in wanted][:3]
    assert ranked[0]["document"] == {"text": "a query"} and ranked[0]["relevance_score"] == pytest.approx(
        1.0, abs=1e-4
    )


def test_the_best_of_several_answers_of_a_chat(real_client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
        "seed": 1,
    }

    def ranked(answer: Any) -> list[float]:
        return [sum(one.logprob for one in choice.logprobs.content) for choice in answer.choices]

    every = real_client.chat.completions.create(n=4, logprobs=True, extra_body={"ignore_eos": True}, **body)
    best = real_client.chat.completions.create(
        n=1, logprobs=True, extra_body={"ignore_eos": True, "best_of": 4}, **body
    )
    assert ranked(best) == pytest.approx([max(ranked(every))], abs=1e-5)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_beam_search_finds_what_the_engine_finds_for_itself(real_server: RealServer, path: str) -> None:
    """The judge is LLM.beam_search, which transformers judges in turn."""
    from minivllm import LLM, BeamSearchParams

    prompts = [[5, 6, 7], [9, 8]]
    common = {
        "n": 3,
        "max_tokens": 5,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "return_token_ids": True,
    }
    common |= {"temperature": 0, "repetition_penalty": 1}
    if path == "completions":
        answer = post(real_server, f"/v1/{path}", {"prompt": prompts, **common})
    else:
        answer = post(real_server, f"/v1/{path}", {"messages": [{"role": "user", "content": "a"}], **common})
        prompts = [answer["prompt_token_ids"]]
    with LLM(
        model=str(real_server.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        num_gpu_blocks_override=40,
    ) as llm:
        wanted = llm.beam_search(
            [{"prompt_token_ids": one} for one in prompts],
            BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5),
        )
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        sequence.token_ids for one in wanted for sequence in one.sequences
    ]
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * len(prompts)))
    for fields, param in (
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
    ):
        body = {"prompt": [5], "use_beam_search": True, **fields}
        assert post(real_server, "/v1/completions", body, 400)["error"]["param"] == param
    assert post(real_server, "/v1/completions", {"prompt": [5], "length_penalty": 1}, 400)["error"][
        "param"
    ] == ("length_penalty")
