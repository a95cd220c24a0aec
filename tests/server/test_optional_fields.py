"""Fields that may be left out: null says the same at every depth,
and labels of other servers' clients say nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import pytest
from pydantic.fields import FieldInfo

import minivllm.server.app
from minivllm.server.bodies.body import Body
from minivllm.server.bodies.other_clients import ADVICE, LABELS
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

assert minivllm.server.app, "imported for all the bodies that it imports"


def all_bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from all_bodies(subclass)


def least(annotation: Any) -> Any:
    """A value of a required field, as small as it can be."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return least(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return least(next(one for one in arguments if one is not NoneType))
    if origin is list:
        return [least(arguments[0])]
    if origin is dict or annotation is dict:
        return {}
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return least_body(annotation)
    return {str: "x", int: 1, float: 1.0, bool: True, Any: None}[annotation]


def least_body(kind: type[Body]) -> dict[str, Any]:
    def value(field: FieldInfo) -> Any:
        return (
            []
            if any(getattr(one, "max_length", None) == 0 for one in field.metadata)
            else least(field.annotation)
        )

    return {
        field.alias or name: value(field) for name, field in kind.model_fields.items() if field.is_required()
    }


OPTIONAL = sorted(
    {
        (kind, field.alias or name)
        for kind in all_bodies()
        for name, field in kind.model_fields.items()
        if not field.is_required()
    },
    key=lambda pair: (pair[0].__name__, pair[1]),
)


@pytest.mark.parametrize(
    ("kind", "name"), OPTIONAL, ids=lambda one: one if isinstance(one, str) else one.__name__
)
def test_null_is_the_same_as_leaving_a_field_out(kind: type[Body], name: str) -> None:
    """The server's schema says so as well."""
    without = least_body(kind)
    assert kind.model_validate({**without, name: None}) == kind.model_validate(without)
    declared = kind.model_json_schema()["properties"][name]
    allowed = [declared, *declared.get("anyOf", ())]
    assert declared.keys() <= {"title", "default"} or any(
        one.get("type") == "null" or None in one.get("enum", ()) for one in allowed
    )


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say:fine"}]}


def ask(server: ServedCore, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=30)


def test_labels_of_other_servers_clients_change_nothing_and_are_logged_once(
    server: ServedCore, caplog: pytest.LogCaptureFixture
) -> None:
    from minivllm.server.bodies import other_clients

    other_clients._log.cache_clear()
    labels = {name: "x" for name in LABELS}
    with caplog.at_level(logging.INFO, logger="minivllm.server.bodies.other_clients"):
        for _ in range(2):
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/completions", {"prompt": "say:fine"}),
                ("/v1/responses", {"input": "say:fine"}),
                ("/v1/embeddings", {"input": "fine"}),
                ("/tokenize", {"prompt": "fine"}),
            ):
                assert ask(server, path, {**body, **labels}).status_code == 200
    told = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(told, key=str) == sorted(LABELS)


def test_cache_control_may_stand_wherever_clients_of_other_servers_put_it(server: ServedCore) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "say:fine", **control}
    message = {"role": "user", "content": [part], **control}
    tool = {"type": "function", "function": {"name": "f", **control}, **control}
    answer = ask(
        server, "/v1/chat/completions", {"messages": [message], "tools": [tool], "tool_choice": "none"}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("name", ["options", "guided_json", "repeat_penalty", "format"])
def test_what_would_change_the_answer_is_refused_with_advice(server: ServedCore, name: str) -> None:
    error = ask(server, "/v1/chat/completions", {**CHAT, name: {}}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert ADVICE[name] in error["message"]


def test_a_strict_server_refuses_labels_too(scripts: Scripts, server: ServedCore) -> None:
    with served(ScriptedCore(scripts), scripts.tokenizer, strict=True) as strict:
        for body, param in (
            ({**CHAT, "chat_id": "x"}, "chat_id"),
            (
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}
                    ]
                },
                "messages.0.content.0.cache_control",
            ),
        ):
            assert ask(strict, "/v1/chat/completions", body).json()["error"]["param"] == param
            assert ask(server, "/v1/chat/completions", body).status_code == 200
        assert ask(strict, "/v1/chat/completions", CHAT).status_code == 200


def test_storing_is_accepted_and_nothing_is_kept(server: ServedCore) -> None:
    assert ask(server, "/v1/chat/completions", {**CHAT, "store": True}).status_code == 200


def test_top_p_of_0_takes_the_likeliest_token(server: ServedCore) -> None:
    """OpenAI's range begins at 0."""
    assert ask(server, "/v1/chat/completions", {**CHAT, "top_p": 0, "temperature": 1}).status_code == 200
    params = server.core.admitted[-1].sampling_params
    assert (params.top_p, params.top_k, params.temperature) == (1.0, 1, 1.0)
    assert ask(server, "/v1/responses", {"input": "say:fine", "top_p": 0}).json()["top_p"] == 0
