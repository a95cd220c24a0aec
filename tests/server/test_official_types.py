"""Every field of the official client's request types is served, accepted where it changes nothing,
or refused by name.

The judge is the client's own declarations, walked from the request down;
none may end as an unknown parameter.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
import typing_extensions
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from minivllm.server.protocol.chat import ChatCompletionRequest
from minivllm.server.protocol.completions import CompletionRequest, EmbeddingRequest
from minivllm.server.protocol.responses import ResponseRequest
from tests.server.serving import ServedCore

REQUESTS: dict[str, tuple[Any, type[BaseModel]]] = {
    "chat/completions": (chat_create_params.CompletionCreateParamsStreaming, ChatCompletionRequest),
    "completions": (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    "embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    "responses": (response_create_params.ResponseCreateParamsStreaming, ResponseRequest),
}
GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "say:fine"}]},
    "completions": {"prompt": "say:fine"},
    "embeddings": {"input": "fine"},
    "responses": {"input": "say:fine"},
}


def parts(annotation: Any, is_wanted: Any) -> list[Any]:
    """The types inside an annotation that are wanted, without looking into them."""
    if is_wanted(annotation):
        return [annotation]
    return [found for inside in typing.get_args(annotation) for found in parts(inside, is_wanted)]


def is_body(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def fields_of(kind: Any) -> dict[str, Any]:
    """name on the wire -> annotation"""
    if is_body(kind):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return typing.get_type_hints(kind)


def tags(kind: Any) -> dict[str, set[str]]:
    """The values of the fields by which members of a union are told apart."""
    found = {}
    for name, annotation in fields_of(kind).items():
        literals = parts(annotation, lambda one: typing.get_origin(one) is Literal)
        if name in ("type", "role") and literals:
            found[name] = {value for literal in literals for value in typing.get_args(literal)}
    return found


def unknown(official: Any, ours: Any, path: str, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Paths of official fields that the bodies here do not have.
    Where there is no body, the value is refused."""
    bodies = parts(ours, is_body)
    for kind in parts(official, typing_extensions.is_typeddict):
        wanted = tags(kind)
        fitting = [
            body
            for body in bodies
            if all(wanted[name] & values for name, values in tags(body).items() if name in wanted)
        ]
        takes_any = any(body.model_config.get("extra") == "ignore" for body in fitting)
        if kind in seen or not fitting or takes_any:
            continue
        for name, annotation in fields_of(kind).items():
            known = [fields_of(body)[name] for body in fitting if name in fields_of(body)]
            if not known:
                yield f"{path}.{name}"
            for annotation_here in known:
                yield from unknown(annotation, annotation_here, f"{path}.{name}", seen | {kind})


@pytest.mark.parametrize("path", REQUESTS)
def test_no_field_of_the_official_types_is_unknown(path: str) -> None:
    assert sorted(set(unknown(*REQUESTS[path], path))) == []


SHARED_NEUTRAL: dict[str, list[Any]] = {
    "metadata": [{"run": "7"}],
    "user": ["me"],
    "safety_identifier": ["me"],
    "prompt_cache_key": ["tenant"],
    "prompt_cache_retention": ["in_memory"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "service_tier": ["auto", "default"],
    "parallel_tool_calls": [True, False],
    "tools": [[]],
    "tool_choice": ["auto", "none"],
    "temperature": [1],
    "top_p": [1],
}
NEUTRAL: dict[str, dict[str, list[Any]]] = {
    "chat/completions": {
        **SHARED_NEUTRAL,
        "n": [1],
        "logit_bias": [{}],
        "stop": [[]],
        "store": [False, True],
        "verbosity": ["medium"],
        "modalities": [["text"]],
        "reasoning_effort": ["none"],
        "logprobs": [False],
        "top_logprobs": [0],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "response_format": [{"type": "text"}],
        "frequency_penalty": [0],
        "presence_penalty": [0],
    },
    "completions": {
        "best_of": [1],
        "echo": [False],
        "suffix": [""],
        "user": ["me"],
        "logit_bias": [{}],
        "n": [1],
    },
    "embeddings": {"encoding_format": ["float"], "user": ["me"]},
    "responses": {
        **SHARED_NEUTRAL,
        "store": [True, False],
        "background": [False],
        "truncation": ["disabled", "auto"],
        "max_tool_calls": [3],
        "include": [[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]],
        "text": [{"verbosity": "medium"}, {"format": {"type": "text"}}],
        "reasoning": [{}, {"effort": "none", "summary": "auto"}],
        "top_logprobs": [0],
        "context_management": [[]],
    },
}


@pytest.fixture(scope="module")
def http(server: ServedCore) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


NOT_TO_BE_NULL = {"messages", "prompt", "input"}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_is_accepted_at_its_neutral_values(http: httpx.Client, path: str) -> None:
    """null is one for every field that can be left out."""
    for name in fields_of(REQUESTS[path][0]):
        for value in [*([] if name in NOT_TO_BE_NULL else [None]), *NEUTRAL[path].get(name, [])]:
            answer = http.post(f"/v1/{path}", json={**GOOD[path], name: value})
            assert answer.status_code == 200, (name, value, answer.text)
    streamed = {**GOOD[path], "stream": True, "stream_options": {"include_obfuscation": False}}
    if path != "embeddings":
        assert http.post(f"/v1/{path}", json=streamed).status_code == 200


SHARED_REFUSED: dict[str, Any] = {
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "service_tier": "flex",
    "moderation": {"model": "m"},
    "tools": [{"type": "unheard_of"}],
    "tool_choice": {"type": "web_search"},
    "stream_options": {"include_obfuscation": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **SHARED_REFUSED,
        "audio": {"format": "mp3", "voice": "ash"},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "messages": [{"role": "function", "name": "f", "content": "x"}],
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "high",
        "verbosity": "low",
        "web_search_options": {},
    },
    "completions": {"suffix": "end"},
    "embeddings": {"dimensions": 3},
    "responses": {
        **SHARED_REFUSED,
        "access_programs": {"cyber": "standard"},
        "background": True,
        "background_options": {},
        "context_management": [{"type": "compaction"}],
        "conversation": "c",
        "image": {},
        "input": [{"type": "item_reference", "id": "i"}],
        "previous_response_id": "resp-1",
        "prompt": {"id": "p"},
        "reasoning": {"summary": "detailed"},
        "text": {"verbosity": "high"},
        "top_logprobs": 2,
    },
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, fields in REFUSED.items() for name in fields]
)
def test_what_cannot_be_served_is_named(client: openai.OpenAI, path: str, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.post(f"/{path}", body={**GOOD[path], name: REFUSED[path][name]}, cast_to=object)
    assert raised.value.param is not None and raised.value.param.split(".")[0] == name
    assert "Unknown parameter" not in raised.value.message and "_kind" not in raised.value.message
