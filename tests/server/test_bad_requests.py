"""Whatever cannot be served is refused with a status, a sentence and the field's path; the server goes on."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from minivllm.errors import ConfigError
from minivllm.server.run import listen
from minivllm.server.service.settings import ServerSettings
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

GOOD = {"messages": [{"role": "user", "content": "say:fine"}]}

BAD_CHATS: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "an unknown parameter": ({"tempreature": 1}, 400, "tempreature", "Unknown parameter: 'tempreature'"),
    "an unknown nested parameter": (
        {"stream_options": {"include": 1}},
        400,
        "stream_options.include",
        "Unknown",
    ),
    "a wrong type": ({"temperature": "hot"}, 400, "temperature", "valid number"),
    "a number as text": ({"max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    "a wrong type deep inside": (
        {"messages": [{"role": "user", "content": 3}]},
        400,
        "messages.0.content",
        "string",
    ),
    "an unknown role": (
        {"messages": [{"role": "boss", "content": "x"}]},
        400,
        "messages.0.role",
        "developer",
    ),
    "no messages": ({"messages": []}, 400, "messages", "at least 1"),
    "too hot": ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    "n of a million": ({"n": 10**6}, 400, "n", "less than or equal to 128"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "equal to 20"),
    "top_logprobs alone": ({"top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    "too many stop strings": ({"stop": ["x"] * 65}, 400, "stop", "at most 64"),
    "too many stop expressions": ({"stop_regex": ["x"] * 17}, 400, "stop_regex", "at most 16"),
    "an empty stop expression": ({"stop_regex": [""]}, 400, "stop_regex.0", "at least 1"),
    "a long stop expression": ({"stop_regex": "x" * 1025}, 400, "stop_regex", "at most 1024"),
    "a broken stop expression": ({"stop_regex": "(a"}, 400, "stop_regex.0", "missing )"),
    "a stop expression for everywhere": ({"stop_regex": ["a*"]}, 400, "stop_regex.0", "empty text"),
    "a huge stop expression": ({"stop_regex": ["(a{1,1000}){1,1000}"]}, 400, "stop_regex.0", "256 elements"),
    "a bias outside the vocabulary": ({"logit_bias": {"999999": 1}}, 400, "logit_bias", "383"),
    "a stop id outside the vocabulary": ({"stop_token_ids": [5, 384]}, 400, "stop_token_ids.1", "383"),
    "an unknown model": ({"model": "gpt-9"}, 404, "model", "known are: scripted"),
    "a prompt that is too long": ({"max_tokens": 5000}, 400, "messages", "max_model_len is 4096"),
    "two limits": ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "give one"),
    "stream_options alone": (
        {"stream_options": {"include_usage": True}},
        400,
        "stream_options",
        "stream: true",
    ),
    "an image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}
            ]
        },
        400,
        "messages.0.content.0",
        "at most 0 images",
    ),
    "an image that is a text": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
        400,
        "messages.0.content.0.image_url",
        "messages.0.content.0.image_url must be an object.",
    ),
    "a tool answer to nothing": (
        {"messages": [{"role": "tool", "content": "42", "tool_call_id": "c9"}]},
        400,
        "messages.0.tool_call_id",
        "no tool call",
    ),
    "an empty assistant message": (
        {"messages": [{"role": "assistant"}]},
        400,
        "messages.0.content",
        "needs content",
    ),
    "tools without a place": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "tools",
        "chat template",
    ),
    "a chat template of one's own": (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        400,
        "chat_template_kwargs.chat_template",
        "not a name",
    ),
    "thinking without a template for it": (
        {"reasoning_effort": "high"},
        400,
        "reasoning_effort",
        "chat template",
    ),
    "what the engine gives up on": (
        {"messages": [{"role": "user", "content": "say:REFUSE"}]},
        400,
        None,
        "more blocks than the cache has",
    ),
}


@pytest.fixture(scope="module")
def http(server: ServedCore) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


@pytest.fixture(autouse=True)
def serves_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every bad request, a good one is served."""
    yield
    if "http" in request.fixturenames:
        http: httpx.Client = request.getfixturevalue("http")
        answer = http.post("/v1/chat/completions", json=GOOD)
        assert answer.json()["choices"][0]["message"]["content"] == "fine"


def assert_is_error(response: httpx.Response, status: int, *named: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert all(text in error["message"] for text in named), error
    assert "Traceback" not in response.text and "0x" not in response.text
    return dict(error)


@pytest.mark.parametrize("case", BAD_CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_is_refused_by_name(http: httpx.Client, case: str, stream: bool) -> None:
    given, status, param, named = BAD_CHATS[case]
    if stream and case == "stream_options alone":
        pytest.skip("not an error in a stream")
    error = assert_is_error(
        http.post("/v1/chat/completions", json={**GOOD, "stream": stream, **given}), status, named
    )
    assert error["param"] == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a", 3]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 0}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 101}, "logprobs"),
        ({"prompt": ["a"] * 200, "n": 4}, "n"),
    ],
)
def test_a_bad_completion_is_refused_by_name(http: httpx.Client, given: dict[str, Any], param: str) -> None:
    assert assert_is_error(http.post("/v1/completions", json=given), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "given", "param", "told"),
    [
        ("embeddings", {"input": ["a"] * 2049}, "input", "at most 2048 items"),
        ("completions", {"prompt": ["a"] * 2049}, "prompt", "at most 2048 items"),
        ("embeddings", {"input": ["a", ""]}, "input.1", "at least 1 character"),
        ("embeddings", {"input": "a " * 9000}, "input", "max_model_len"),
        ("completions", {"prompt": "a " * 9000}, "prompt", "max_model_len"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a " * 9000}]},
            "messages",
            "max_model_len",
        ),
        ("responses", {"input": "a " * 9000}, "input", "max_model_len"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role", "is missing"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages.0.content.0.type",
            "is missing",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "foo": 1}]}]},
            "messages.0.content.0.foo",
            "Unknown parameter: 'messages.0.content.0.foo'",
        ),
        ("chat/completions", {**GOOD, "logit_bias": {"99999999": 1}}, "logit_bias", "99999999"),
        (
            "responses",
            {"input": "x", "reasoning": {"effort": "low"}},
            "reasoning.effort",
            "reasoning.effort has",
        ),
        ("responses", {"input": "x", "tools": [{"type": "function", "name": "f"}]}, "tools", "chat template"),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input.0.call_id",
            "names no tool call",
        ),
        ("responses", {"input": "x", "max_output_tokens": 5000}, "input", "max_model_len"),
    ],
)
def test_a_refusal_blames_the_field_that_the_client_wrote(
    http: httpx.Client, path: str, given: dict[str, Any], param: str, told: str
) -> None:
    error = assert_is_error(http.post(f"/v1/{path}", json=given), 400, told)
    assert error["param"] == param
    assert error["message"].count(".  ") == 0 and error["message"].rstrip(".").count(". ") <= 1, error[
        "message"
    ]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none_are_refused(http: httpx.Client, name: str, number: str) -> None:
    body = json.dumps(GOOD)[:-1] + f', "{name}": {number}}}'
    response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert assert_is_error(response, 400)["param"] == name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "user": "\\udfff"}',
    ],
)
def test_a_body_that_is_no_proper_json_object_is_refused(http: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_is_error(http.post("/v1/chat/completions", content=content, headers=headers), 400)


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "text/json", None]
)
def test_a_body_of_another_type_is_refused_with_the_header_it_needs(
    http: httpx.Client, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = http.post("/v1/chat/completions", content=json.dumps(GOOD), headers=headers)
    error = assert_is_error(response, 415, "Content-Type: application/json")
    assert (content_type or "without that header") in error["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/problem+json"])
def test_json_under_its_other_names_is_read(http: httpx.Client, content_type: str) -> None:
    response = http.post(
        "/v1/chat/completions", content=json.dumps(GOOD), headers={"content-type": content_type}
    )
    assert response.status_code == 200


def test_a_compressed_body_is_refused_and_never_unpacked(http: httpx.Client) -> None:
    packed = gzip.compress(json.dumps(GOOD).encode())
    for encoding in ("gzip", "deflate", "br", "identity, gzip"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        response = http.post("/v1/chat/completions", content=packed, headers=headers)
        assert_is_error(response, 415, "Content-Encoding")
        assert response.headers["accept-encoding"] == "identity"
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert http.post("/v1/chat/completions", content=json.dumps(GOOD), headers=headers).status_code == 200


def test_an_unknown_path_or_method_has_the_same_form(http: httpx.Client) -> None:
    assert_is_error(http.get("/v1/nothing"), 404, "/v1/nothing")
    assert "POST" in http.get("/v1/chat/completions").headers["allow"]
    assert_is_error(http.get("/v1/chat/completions"), 405, "POST")


def test_a_body_that_is_too_large_is_refused_before_it_is_read(http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", http.base_url.port or 0), timeout=30) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n{"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 65536

    with httpx.Client(base_url=str(http.base_url)) as fresh:
        response = fresh.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json"}
        )
        assert_is_error(response, 413, "4194304 bytes")


def test_a_prompt_of_several_megabytes_is_refused_and_blocks_nobody(
    http: httpx.Client, server: ServedCore
) -> None:
    num_admitted = len(server.core.admitted)
    error = assert_is_error(
        http.post("/v1/completions", json={"prompt": "a b " * 250_000}), 400, "max_model_len"
    )
    assert error["code"] == "context_length_exceeded"
    assert len(server.core.admitted) == num_admitted


@pytest.mark.parametrize("length", [4094, 4095, 4096])
def test_the_context_limit_is_exact(http: httpx.Client, scripts: Scripts, length: int) -> None:
    response = http.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": 1})
    if length < 4096:
        assert response.status_code == 200
    else:
        assert_is_error(response, 400, "4096 tokens", "max_tokens is 1", "max_model_len is 4096")


def test_a_name_nobody_can_ask_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="served_model_name is empty"):
        ServerSettings(served_model_names=("tiny", " "))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/metrics", "/openapi.json", "/version", "/nothing", "/live"]
)
@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer wrong", "Bearer", "secret-1", "Basic secret-1", "Bearer secret-1 x", "Bearer é"],
)
def test_nothing_but_page_health_and_readiness_is_open(
    keyed: ServedCore, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    with httpx.Client(base_url=keyed.url, headers=headers) as http:
        assert_is_error(http.get(path), 401, "Bearer")
        assert [http.get(path).status_code for path in ("/", "/health", "/ready")] == [200] * 3


@pytest.fixture(scope="module")
def keyed(scripts: Scripts) -> Iterator[ServedCore]:
    core = ScriptedCore(scripts)
    with served(
        core, scripts.tokenizer, api_keys=("secret-1", "secret-2"), cors_origins=("https://a.example",)
    ) as run:
        yield run


@pytest.mark.parametrize("key", ["secret-1", "secret-2"])
def test_every_key_opens_the_server_to_the_official_client(keyed: ServedCore, key: str) -> None:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0) as client:
        assert client.chat.completions.create(model="scripted", **GOOD).choices[0].message.content == "fine"  # type: ignore[call-overload]
    with (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key + "x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize(
    "path",
    ["/health/../v1/models", "//v1/models", "/health/", "/health%2f..%2fv1/models", "/HEALTH", "/ready/x"],
)
def test_no_spelling_of_a_path_gets_around_the_key(keyed: ServedCore, path: str) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", keyed.port)
    for host in ("127.0.0.1", "health", "x/health?"):
        connection.request("GET", path, headers={"Host": host})
        response = connection.getresponse()
        assert response.status == 401, (path, host)
        response.read()
    connection.close()


def test_browsers_of_other_pages_are_told_nothing(keyed: ServedCore, server: ServedCore) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert (
        httpx.options(f"{keyed.url}/v1/models", headers=ask).headers["access-control-allow-origin"]
        == ask["origin"]
    )
    other = {**ask, "origin": "https://b.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{keyed.url}/v1/models", headers=other).headers
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=ask).headers


def test_a_page_that_may_call_may_send_every_header_of_its_client(keyed: ServedCore) -> None:
    """What the official JavaScript client sends in a browser."""
    headers = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version"
    headers += ",x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
    ask = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }
    answer = httpx.options(f"{keyed.url}/v1/chat/completions", headers=ask)
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(headers.split(",")) <= set(allowed)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/v1/models", "/v1/models/scripted", "/metrics", "/nothing"]
)
def test_head_is_answered_as_get_without_a_body(server: ServedCore, path: str) -> None:
    with httpx.Client(base_url=server.url) as http:
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]


def test_a_request_id_is_echoed_and_is_no_key(server: ServedCore) -> None:
    headers = {"x-request-id": "mine-1"}
    with httpx.Client(base_url=server.url) as http:
        answers = [http.post("/v1/chat/completions", json=GOOD, headers=headers) for _ in range(2)]
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1"] * 2
        assert len({answer.json()["id"] for answer in answers}) == 2
        assert all("mine-1" not in request.request_id for request in server.core.admitted)
        assert (
            http.get("/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"].startswith("req-")
        )


NAMES_OF_THIS_MACHINE = [
    "localhost",
    "LOCALHOST:9",
    "localhost.",
    "chat.localhost",
    "127.0.0.1:8000",
    "[::1]:80",
]
NAMES_OF_THE_LOCAL_NETWORK = ["x", "mybox:8000", "My_Box-2", "192.168.0.7:80", "[2001:db8::1]"]


@pytest.mark.parametrize("host", NAMES_OF_THIS_MACHINE + NAMES_OF_THE_LOCAL_NETWORK)
def test_a_server_answers_to_addresses_and_to_names_that_no_web_site_has(
    http: httpx.Client, host: str
) -> None:
    assert http.post("/v1/chat/completions", json=GOOD, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "Evil.example.:8000",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "127.1",
        "[evil.example]",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/", "/health", "/nothing"])
def test_a_page_whose_name_leads_to_this_machine_is_refused(http: httpx.Client, host: str, path: str) -> None:
    """DNS rebinding: the browser takes the server for the page's, but names the page's host."""
    method, body = ("POST", GOOD) if "v1" in path else ("GET", None)
    response = http.request(method, path, json=body, headers={"host": host})
    error = assert_is_error(response, 403, "--allowed-host")
    assert error["code"] == "unknown_host" and "localhost" in error["message"]


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({}, {"127.0.0.1"}),
        ({"allowed_hosts": ("My.Example", "b.example.")}, {"127.0.0.1", "my.example", "b.example"}),
        ({"api_keys": ("k",)}, None),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": ("a.b",)}, {"0.0.0.0", "a.b"}),
        ({"host": "my.box", "allowed_hosts": ("a.b",)}, {"my.box", "a.b"}),
        ({"api_keys": ("k",), "allowed_hosts": ("a.b",)}, {"127.0.0.1", "a.b"}),
    ],
)
def test_host_names_matter_where_nothing_else_protects_or_they_are_given(
    settings: dict[str, Any], known: set[str] | None
) -> None:
    assert ServerSettings(**settings).known_hosts == known


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "a/b", "::1", "a b"])
def test_a_name_that_is_none_is_refused_as_an_allowed_host(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_host is"):
        ServerSettings(allowed_hosts=(host,))


def raw_answer(server: ServedCore, head: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


def test_a_target_in_absolute_form_is_read_and_its_host_counts(server: ServedCore) -> None:
    for authority in ("localhost", f"127.0.0.1:{server.port}"):
        answer = raw_answer(server, f"GET http://{authority}/v1/models HTTP/1.1\r\nHost: evil.example")
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"scripted"' in answer
    assert raw_answer(server, "GET HTTP://localhost/nothing?a=b HTTP/1.1\r\nHost: a")[9:12] == b"404"
    assert b"text/html" in raw_answer(server, "GET http://localhost HTTP/1.1\r\nHost: a")
    answer = raw_answer(server, "GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost")
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/scripted", "/health", "/version", "/metrics", "/", "/live"]
)
def test_head_is_answered_like_get_without_a_body(server: ServedCore, path: str) -> None:
    answer = raw_answer(server, f"HEAD {path} HTTP/1.1\r\nHost: localhost")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == b""
    length = httpx.get(server.url + path).headers["content-length"]
    assert f"content-length: {length}".encode() in head or path in (
        "/metrics",
        "/live",
    )  # their figures change


def test_head_is_refused_where_get_is(server: ServedCore) -> None:
    assert raw_answer(server, "HEAD /v1/completions HTTP/1.1\r\nHost: localhost")[9:12] == b"405"
    assert raw_answer(server, "HEAD /nothing HTTP/1.1\r\nHost: localhost")[9:12] == b"404"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70 + ".example", "a..b", "[::1", "300.1.1.1"])
def test_a_host_that_is_none_is_a_sentence(host: str) -> None:
    with pytest.raises(
        ConfigError, match=f"cannot listen on {re.escape(host)} port 0: .*Choose another --host or"
    ):
        listen(ServerSettings(host=host, port=0))


def test_a_port_belongs_to_the_first_server_from_its_start_on() -> None:
    """Before its model is loaded, and before the second one loads any."""
    with listen(ServerSettings(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ):
            listen(ServerSettings(port=port))
    listen(ServerSettings(port=port)).close()
