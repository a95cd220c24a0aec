"""The proxy in front of scripted servers:
who is asked what, who steps in, and what clients can and cannot do."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
from httpcore._backends.auto import AutoBackend
from typer.testing import CliRunner

from minivllm.cli import commands
from minivllm.errors import ConfigError
from minivllm.messages import EngineRequest
from minivllm.server.bodies.errors import ApiError
from minivllm.server.limits.connections import ConnectionLimits
from minivllm.server.proxy import relay as relay_module
from minivllm.server.proxy.pool import SLACK, Pool
from minivllm.server.proxy.prompts import Prompt
from minivllm.server.proxy.proxy_app import build_proxy_app
from minivllm.server.proxy.relay import Relay, RelaySettings
from minivllm.server.run import Uvicorn, listen
from minivllm.server.service.settings import ServerSettings
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

LONG = "say:" + "one two three four five six seven " * 6
"""Long enough for prefill, with the threshold of these tests."""
THRESHOLD = 20


class RunningProxy:
    """A proxy in a thread, with the servers behind it."""

    def __init__(self, relay: Relay, url: str, prefill: list[ServedCore], decode: list[ServedCore]) -> None:
        self.relay, self.url, self.prefill, self.decode = relay, url, prefill, decode

    def ways(self) -> dict[str, int]:
        text = httpx.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("minivllm_proxy_requests_total{")]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "unused", "max_retries": 0, **settings})


@contextmanager
def proxied(
    prefill: list[Any], decode: list[Any], api_keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[Any]:
    """prefill, decode: servers, or addresses."""
    urls = [[one if isinstance(one, str) else one.url for one in servers] for servers in (prefill, decode)]
    options = {"min_prefill_tokens": THRESHOLD, "prefill_timeout": 20.0, **settings}
    listener = listen(ServerSettings(port=0))
    box: dict[str, Any] = {}
    started = threading.Event()

    async def main() -> None:
        relay = Relay(RelaySettings(prefill=urls[0], decode=urls[1], **options))
        server = Uvicorn(build_proxy_app(relay, api_keys, 2**20), ConnectionLimits(), 2.0)
        box.update(relay=relay, server=server, loop=asyncio.get_running_loop())
        started.set()
        await server.serve([listener])
        await relay.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="proxy")
    thread.start()
    started.wait(20)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        while not box["server"].started:
            time.sleep(0.005)
        yield RunningProxy(box["relay"], url, prefill, decode)
    finally:
        box["loop"].call_soon_threadsafe(box["server"].exit_now)
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def servers(scripts: Scripts) -> Iterator[Callable[[int], list[ServedCore]]]:
    """Scripted servers called "tiny"; those that a test stops are its own."""
    with ExitStack() as stack:

        def make(count: int) -> list[ServedCore]:
            cores = [ScriptedCore(scripts) for _ in range(count)]
            return [
                stack.enter_context(served(core, scripts.tokenizer, served_model_names=("tiny",)))
                for core in cores
            ]

        yield make


@pytest.fixture(scope="module")
def pair(servers: Callable[[int], list[ServedCore]]) -> Iterator[RunningProxy]:
    prefill, decode = servers(2)
    with proxied([prefill], [decode]) as proxy:
        yield proxy


def asked(server: ServedCore) -> list[EngineRequest]:
    return server.core.admitted


def clear(*proxies: RunningProxy) -> None:
    for proxy in proxies:
        for server in [*proxy.prefill, *proxy.decode]:
            asked(server).clear()


def test_a_long_prompt_is_computed_by_one_server_and_answered_by_the_other(pair: RunningProxy) -> None:
    clear(pair)
    before = pair.ways()
    with pair.client() as client:
        chunks = client.completions.create(model="tiny", prompt=LONG, max_tokens=300, stream=True, logprobs=1)
        text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text.strip() == LONG.removeprefix("say:").strip()
    [first], [second] = asked(pair.prefill[0]), asked(pair.decode[0])
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.max_tokens == 1 and first.sampling_params.logprobs is None and second.max_tokens == 300
    assert {way: count - before[way] for way, count in pair.ways().items()} == {
        "prefill": 1,
        "decode_alone": 0,
        "prefill_failed": 0,
    }


def test_a_short_prompt_goes_to_the_decode_server_alone(pair: RunningProxy) -> None:
    clear(pair)
    with pair.client() as client:
        answer = client.completions.create(model="tiny", prompt="say:one two", max_tokens=5)
        assert answer.choices[0].text.split() == ["one", "two"]
    assert not asked(pair.prefill[0]) and len(asked(pair.decode[0])) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_chats_and_responses_have_the_same_prompt_on_both_sides(pair: RunningProxy, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_completion_tokens": 7}),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}], "min_tokens": 3}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": LONG}], "top_logprobs": 2, "logprobs": True},
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": LONG}], "response_format": schema, "n": 2},
        ),
        ("responses", {"input": LONG, "instructions": "Be short.", "max_output_tokens": 9}),
        ("completions", {"prompt": [LONG, "say:five"], "best_of": None, "echo": True}),
        ("completions", {"prompt": list(range(4, 60)), "cache_salt": "tenant", "min_tokens": 4}),
    ]
    for path, body in bodies:
        clear(pair)
        response = httpx.post(
            f"{pair.url}/v1/{path}", json={**body, "model": "tiny", "stream": stream}, timeout=30
        )
        assert response.status_code == 200, response.text
        first, second = asked(pair.prefill[0]), asked(pair.decode[0])
        prompts = [{tuple(one.prompt_token_ids) for one in side} for side in (first, second)]
        assert prompts[0] == prompts[1] != set(), body
        assert {one.cache_salt for one in first} == {one.cache_salt for one in second}
        assert {one.max_tokens for one in first} == {1}


def test_the_official_client_streams_chats_and_responses_through_it(pair: RunningProxy) -> None:
    wish = LONG.removeprefix("say:").strip()
    with pair.client() as client:
        messages: Any = [{"role": "user", "content": LONG}]
        chunks = client.chat.completions.create(
            model="tiny",
            messages=messages,
            stream=True,
            max_tokens=300,
            stream_options={"include_usage": True},
        )
        pieces = list(chunks)
        assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices).strip() == wish
        assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens > 10
        with client.responses.stream(model="tiny", input=LONG, max_output_tokens=300) as events:
            assert [event.type for event in events][-1] == "response.completed"
            assert events.get_final_response().output_text.strip() == wish


def test_clients_may_not_say_where_keys_and_values_come_from(pair: RunningProxy) -> None:
    clear(pair)
    body = {"model": "tiny", "prompt": LONG, "kv_transfer_params": {"remote_host": "10.0.0.1"}}
    for url in (pair.url, pair.prefill[0].url, pair.decode[0].url):
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 400 and "kv_transfer_params" in response.json()["error"]["message"]
    assert not asked(pair.prefill[0]) and not asked(pair.decode[0])


def test_what_is_refused_is_refused_in_the_servers_own_words(pair: RunningProxy) -> None:
    for body in (
        {"model": "tiny", "prompt": LONG, "nonsense": 1},
        {"model": "other", "prompt": LONG},
        {"model": "tiny", "prompt": LONG, "temperature": -1},
        {"model": "tiny", "prompt": [[1, 2], "a"]},
        [1, 2],
    ):
        direct = httpx.post(f"{pair.decode[0].url}/v1/completions", json=body)
        through = httpx.post(f"{pair.url}/v1/completions", json=body)
        assert (through.status_code, through.json()) == (direct.status_code, direct.json())
        assert 400 <= through.status_code < 500
    broken = httpx.post(
        f"{pair.url}/v1/completions", content=b'{"prompt": "a', headers={"content-type": "a/json"}
    )
    assert broken.status_code == 415 and broken.json()["error"]
    assert httpx.post(f"{pair.url}/v1/completions", content=b"x" * 2**21).status_code == 413
    assert httpx.get(f"{pair.url}/v1/nothing").status_code == 404
    assert httpx.post(f"{pair.url}/v1/load_lora_adapter", json={}).status_code == 404


def test_models_health_and_tokens_are_those_of_the_servers(pair: RunningProxy) -> None:
    assert httpx.get(f"{pair.url}/health").json() == {"status": "ok", "prefill": 1, "decode": 1}
    assert httpx.get(f"{pair.url}/ready").json() == {"status": "ok", "prefill": 1, "decode": 1}
    with pair.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
    answer = httpx.post(f"{pair.url}/tokenize", json={"prompt": "one two"})
    assert answer.json()["count"] == len(answer.json()["tokens"])


def test_a_client_that_leaves_is_followed_by_both_servers(
    servers: Callable[[int], list[ServedCore]], scripts: Scripts
) -> None:
    for stage in ("prefill", "stream", "whole"):
        prefill, decode = servers(2)
        with proxied([prefill], [decode]) as proxy, proxy.client(timeout=0.5) as client:
            body: dict[str, Any] = {"model": "tiny", "prompt": LONG, "max_tokens": 400}
            body["extra_body"] = {"ignore_eos": True}
            if stage == "prefill":
                prefill.core.held = True
            decode.core.step_seconds = 0.05
            if stage == "stream":
                stream = client.completions.create(**body, stream=True)
                next(iter(stream))
                stream.close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    client.completions.create(**body)
            end = time.monotonic() + 20
            while (
                prefill.core.running
                or decode.core.running
                or any(one.load for one in [*proxy.relay.prefill.backends, *proxy.relay.decode.backends])
            ):
                assert time.monotonic() < end, stage
                time.sleep(0.01)
            assert bool(asked(decode)) == (stage != "prefill")


def refused_address() -> str:
    """An address without a listener."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def test_a_prefill_server_that_is_not_there_is_done_without(pair: RunningProxy) -> None:
    clear(pair)
    with proxied([refused_address()], pair.decode) as proxy, proxy.client() as client:
        answer = client.completions.create(model="tiny", prompt=LONG, max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        assert proxy.ways()["prefill_failed"] == 1
        assert httpx.get(f"{proxy.url}/ready").json() == {"status": "ok", "prefill": 0, "decode": 1}
    with proxied([refused_address(), *pair.prefill], pair.decode) as proxy, proxy.client() as client:
        for number in range(6):  # some of them prefer the one that is not there
            client.completions.create(model="tiny", prompt=f"{number} {LONG}", max_tokens=4)
        assert proxy.ways()["prefill"] == 6


@contextmanager
def silent() -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes every request and never answers: its address, and the heads of what it got."""
    connections: list[socket.socket] = []
    heads: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connections.append(listener.accept()[0])
                    heads.append(connections[-1].recv(65536).partition(b" HTTP")[0])
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
            for connection in connections:
                connection.close()


def end_rest(pool: Pool) -> None:
    """The time for which failed servers rest has passed."""
    for one in pool.backends:
        one._rests_until = 0.0


def test_a_prefill_server_that_hangs_costs_one_request_its_time_limit(
    pair: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PROBE_SECONDS", 0.2)
    with (
        silent() as (url, heads),
        proxied([url], pair.decode, prefill_timeout=0.3) as proxy,
        proxy.client() as client,
    ):
        for _ in range(3):
            assert client.completions.create(model="tiny", prompt=LONG, max_tokens=4).choices[0].text
        assert heads == [b"POST /v1/completions"]
        for _ in range(2):
            end_rest(proxy.relay.prefill)
            assert client.completions.create(model="tiny", prompt=LONG, max_tokens=4).choices[0].text
        assert heads[1:] == [b"GET /ready"] * 2, "it is asked whether it works before it gets a request again"
        assert proxy.ways()["prefill_failed"] == 5


def test_a_prefill_server_that_works_again_gets_requests_again(
    servers: Callable[[int], list[ServedCore]],
) -> None:
    """Its HTTP server answers all the time, its engine hangs for a while."""
    prefill, decode = servers(2)
    with proxied([prefill], [decode], prefill_timeout=0.5) as proxy, proxy.client() as client:
        prefill.core.held = True
        for number in range(1, 4):
            client.completions.create(model="tiny", prompt=LONG, max_tokens=4)
            assert (proxy.ways()["prefill_failed"], len(asked(prefill))) == (number, 1)
        prefill.core.held = False
        end_rest(proxy.relay.prefill)
        for number in range(1, 4):
            client.completions.create(model="tiny", prompt=LONG, max_tokens=4)
            assert proxy.ways()["prefill"] == number


def test_one_request_at_a_time_tries_a_server_that_has_failed(
    servers: Callable[[int], list[ServedCore]],
) -> None:
    prefill, decode = servers(2)
    with proxied([prefill], [decode], prefill_timeout=20) as proxy:
        prefill.core.held = True
        backend = proxy.relay.prefill.backends[0]
        backend.has_failed = True
        bodies = [{"model": "tiny", "prompt": f"{number} {LONG}", "max_tokens": 2} for number in range(5)]
        with ThreadPoolExecutor(5) as threads:
            answers = [
                threads.submit(httpx.post, f"{proxy.url}/v1/completions", json=body) for body in bodies
            ]
            prefill.wait_until(lambda: sum(one.done() for one in answers) == 4)
            assert len(asked(prefill)) == 1
            prefill.core.held = False
            assert {one.result().status_code for one in answers} == {200}
        assert not backend.has_failed
        assert proxy.ways() == {"prefill": 1, "prefill_failed": 4, "decode_alone": 0}


def test_a_decode_server_that_has_failed_is_asked_whether_it_works_first(
    pair: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PROBE_SECONDS", 0.2)
    with silent() as (url, heads), proxied(pair.prefill, [url], timeout=0.3) as proxy:
        for _ in range(3):
            assert httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert heads == [b"POST /v1/completions", b"GET /ready", b"GET /ready"]


def test_another_decode_server_steps_in_before_the_first_piece(pair: RunningProxy) -> None:
    for stream in (False, True):
        with proxied(pair.prefill, [refused_address(), *pair.decode]) as proxy:
            for number in range(4):
                body = {"model": "tiny", "prompt": f"{number} {LONG}", "max_tokens": 3, "stream": stream}
                assert httpx.post(f"{proxy.url}/v1/completions", json=body).status_code == 200
    with proxied(pair.prefill, [refused_address()]) as proxy:
        response = httpx.post(f"{proxy.url}/v1/completions", json={"model": "tiny", "prompt": LONG})
        assert response.status_code == 503 and response.json()["error"]["code"] == "no_decode_server"
        assert httpx.get(f"{proxy.url}/health").status_code == 503


@contextmanager
def stand_in(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to every client, and hangs up."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(0.2)
                    try:
                        while connection.recv(65536):
                            pass
                    except TimeoutError:
                        pass
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_stream_that_breaks_off_ends_with_an_error(pair: RunningProxy, path: str) -> None:
    with (
        stand_in(STREAM + b"%x\r\n%s\r\n" % (len(PIECE), PIECE)) as url,
        proxied(pair.prefill, [url]) as proxy,
    ):
        body = {"model": "tiny", "input" if path == "responses" else "prompt": "a", "stream": True}
        text = httpx.post(f"{proxy.url}/v1/{path}", json=body).text
        assert text.startswith(PIECE.decode()) and "decode_server_lost" in text
        assert ("event: error" in text) == (path == "responses")


def test_an_answer_that_breaks_off_before_the_client_has_any_is_asked_for_again(pair: RunningProxy) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"
    busy = (
        b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: "
        b"close\r\n\r\n{}"
    )
    for answer in (whole, STREAM, STREAM + b"0\r\n\r\n", busy):
        with stand_in(answer) as url, proxied(pair.prefill, [url, *pair.decode]) as proxy:
            for number in range(3):
                body = {"model": "tiny", "prompt": f"{number} say:one", "max_tokens": 3}
                assert (
                    httpx.post(f"{proxy.url}/v1/completions", json=body).json()["choices"][0]["text"].strip()
                    == "one"
                )
    with stand_in(busy) as url, proxied(pair.prefill, [url]) as proxy:
        assert httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"}).status_code == 503


@contextmanager
def recording() -> Iterator[tuple[str, list[str]]]:
    """A server that answers every GET with its path: its address, and the paths."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", seen
        finally:
            listener.shutdown()
            thread.join(20)


def ask_raw(proxy: RunningProxy, head: bytes) -> bytes:
    """The answer to a request with a head that clients would not write."""
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(head + b"\r\nConnection: close\r\n\r\n")
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


def test_only_the_listed_paths_are_forwarded_and_as_they_were_meant(pair: RunningProxy) -> None:
    names = {
        "a": "a",
        "org/model": "org/model",
        "a%2Fb": "a/b",
        "a%3Fb=1": "a%3Fb%3D1",
        "a%23b": "a%23b",
        "a%25b": "a%25b",
        "%252e%252e/live": "%252e%252e/live",
        "a%00b": "a%00b",
        "a%0d%0ab": None,
        "%C3%A9": "%C3%A9",
        "%ff": "%EF%BF%BD",
        "@evil": "%40evil",
        "..a": "..a",
        "a;b": "a%3Bb",
        "a" * 10_000: "a" * 10_000,
        "../../live": None,
        "..%2F..%2Flive": None,
        "%2e%2e/%2e%2e/openapi.json": None,
        "./live": None,
        "a/..": None,
    }
    with recording() as (url, seen), proxied(pair.prefill, [url]) as proxy:
        for sent, forwarded in names.items():
            seen.clear()
            answer = ask_raw(proxy, b"GET /v1/models/%s HTTP/1.1\r\nHost: localhost" % sent.encode())
            status = b"404" if forwarded is None else b"200"
            assert (answer[9:12], seen) == (status, [f"/v1/models/{forwarded}"] if forwarded else []), sent


def test_headers_that_are_no_ascii_do_not_stop_a_request(pair: RunningProxy) -> None:
    body = b'{"prompt": "say:one"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: \xe9"
    )
    head += b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    assert ask_raw(pair, head)[9:12] == b"200"


@pytest.mark.parametrize("status", [600, 999])
def test_a_status_that_does_not_exist_becomes_502(pair: RunningProxy, status: int) -> None:
    answer = b"HTTP/1.1 %d What\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}" % status
    with stand_in(answer) as url, proxied(pair.prefill, [url]) as proxy:
        response = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"})
        assert response.status_code == 502 and f"status {status}" in response.json()["error"]["message"]
    with stand_in(answer) as url, proxied(pair.prefill, [url, *pair.decode]) as proxy:
        for number in range(4):  # some of them prefer the one that answers this
            response = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": f"{number} say:one"})
            assert response.json()["choices"][0]["text"].strip() == "one"


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
def test_a_compressed_answer_says_so(pair: RunningProxy, content_type: bytes) -> None:
    packed = gzip.compress(b'{"choices": []}')
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    with stand_in(head % (content_type, len(packed)) + packed) as url, proxied(pair.prefill, [url]) as proxy:
        response = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"})
        assert response.headers["content-encoding"] == "gzip"
        assert response.json() == {"choices": []}, "httpx unpacked it"


def test_few_connections_are_made_at_a_time(pair: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged where httpx opens them; those that cannot be opened give their places back."""
    monkeypatch.setattr(relay_module, "MAX_CONNECTING", 3)
    connect, num_now, numbers = AutoBackend.connect_tcp, 0, list[int]()

    async def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal num_now
        num_now += 1
        numbers.append(num_now)
        try:
            await asyncio.sleep(0.01)
            return await connect(*arguments, **settings)
        finally:
            num_now -= 1

    monkeypatch.setattr(AutoBackend, "connect_tcp", counted)

    async def main() -> None:
        places = relay_module.ConnectPlaces()
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
            urls = [f"{pair.decode[0].url}/ready"] * 30 + [refused_address()] * 10
            asking = (client.get(url, extensions={"trace": places}) for url in urls)
            answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [isinstance(one, httpx.Response) for one in answers] == [True] * 30 + [False] * 10

    asyncio.run(main())
    assert len(numbers) >= 11 and max(numbers) == 3


@pytest.mark.parametrize("number", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_a_burst_of_requests_reaches_both_servers(
    servers: Callable[[int], list[ServedCore]], number: int
) -> None:
    """So many clients at once, each with a connection of its own to the proxy,
    which opens as many to its servers."""
    prefill, decode = servers(2)
    for one in (prefill, decode):
        one.run.service.admission.capacity = 1000
    body = json.dumps({"model": "tiny", "prompt": LONG, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def ask_all(port: int) -> set[bytes]:
        connections = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(number))
        )
        for _, writer in connections:
            writer.write(data)
        answers = await asyncio.gather(*(reader.read() for reader, _ in connections))
        for _, writer in connections:
            writer.close()
        return {answer[9:12] for answer in answers}

    with proxied([prefill], [decode], prefill_timeout=120.0) as proxy:
        assert asyncio.run(ask_all(int(proxy.url.rpartition(":")[2]))) == {b"200"}
        assert proxy.ways() == {"prefill": number, "prefill_failed": 0, "decode_alone": 0}


def test_a_key_is_asked_for_and_passed_on(scripts: Scripts) -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                served(
                    ScriptedCore(scripts),
                    scripts.tokenizer,
                    served_model_names=("tiny",),
                    api_keys=("secret",),
                )
            )
            for _ in range(2)
        ]
        with proxied(servers[:1], servers[1:], api_keys=("secret",)) as proxy:
            with proxy.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
                client.completions.create(model="tiny", prompt=LONG)
            with proxy.client(api_key="secret") as client:
                assert client.completions.create(model="tiny", prompt=LONG, max_tokens=2).choices[0].text
                assert [model.id for model in client.models.list()] == ["tiny"]
            assert httpx.get(f"{proxy.url}/metrics").status_code == 401
            answer = httpx.get(f"{proxy.url}/metrics", headers={"authorization": "Bearer secret"})
            assert 'minivllm_proxy_requests_total{way="prefill"} 1.0' in answer.text
            assert httpx.get(f"{proxy.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "at least one --prefill and one --decode"),
        (["--decode", "http://a:1"], "at least one --prefill"),
        (["--prefill", "a", "--decode", "http://b:2"], "--prefill is 'a', but must be like http://"),
        (["--prefill", "http://a:1", "--decode", "b"], "--decode is 'b'"),
        (["--prefill", "http://a:1", "--decode", "http://b:2", "--port", "70000"], "port is 70000"),
    ],
)
def test_the_command_refuses_what_cannot_be_with_a_sentence(flags: list[str], sentence: str) -> None:
    result = CliRunner().invoke(commands.app, ["proxy", *flags])
    assert isinstance(result.exception, ConfigError) and sentence in str(result.exception)


def test_prompts_that_begin_alike_go_to_one_server_unless_it_is_busier() -> None:
    pool = Pool(["http://a", "http://b", "http://c"])
    chosen = {prefix: pool.pick(prefix) for prefix in (b"%d" % number for number in range(30))}
    assert len({one.url for one in chosen.values() if one}) == 3
    assert all(pool.pick(prefix) is one for prefix, one in chosen.items())
    favourite = chosen[b"0"]
    assert favourite is not None
    favourite.load = SLACK
    assert pool.pick(b"0") is favourite
    favourite.load = SLACK + 1
    second = pool.pick(b"0")
    assert second is not favourite and second is not None
    favourite.load = 0
    favourite.rest()
    assert pool.pick(b"0") is second
    assert pool.pick(b"0", pool.backends) is None
    for one in pool.backends:
        one.rest()
    assert pool.pick(b"0") is favourite, "all are resting, so nobody is"
    assert pool.pick(b"0", may_rest=False) is None
    favourite.works()
    assert pool.pick(b"0", may_rest=False) is favourite


@pytest.mark.parametrize(
    ("path", "body", "num_tokens"),
    [
        ("/v1/completions", b'{"prompt": "%s"}' % (b"x" * 400), 100),
        ("/v1/completions", b'{"prompt": [1, 2, 3]}', 3),
        ("/v1/completions", b'{"prompt": [[1, 2, 3], [4]]}', 3),
        ("/v1/completions", b'{"prompt": ["%s", "%s"]}' % (b"x" * 40, b"y" * 80), 20),
        ("/v1/completions", b'{"prompt": []}', 0),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"text": "%s"}]}]}' % (b"x" * 400),
            101,
        ),
        ("/v1/responses", b'{"input": "%s", "instructions": "%s"}' % (b"x" * 40, b"y" * 40), 20),
        (
            "/v1/chat/completions",
            b'{"messages": [{"content": [{"image_url": {"url": "data:%s"}}]}]}' % (b"x" * 9000),
            1024,
        ),
        ("/v1/responses", b'{"input": [{"content": [{"image_url": "data:%s"}]}]}' % (b"x" * 9000), 1024),
        ("/v1/responses", b"no json", 0),
    ],
)
def test_how_long_a_prompt_is_about(path: str, body: bytes, num_tokens: int) -> None:
    assert Prompt(path, body).num_tokens == num_tokens


def test_a_prefix_holds_what_follows_an_image() -> None:
    def prefix(image: str, text: str) -> bytes:
        parts = [
            {"type": "input_image", "image_url": f"data:{image * 9000}"},
            {"type": "input_text", "text": text},
        ]
        return Prompt(
            "/v1/responses", json.dumps({"input": [{"role": "user", "content": parts}]}).encode()
        ).prefix

    assert prefix("a", "What?") == prefix("a", "What?")
    assert len({prefix("a", "What?"), prefix("b", "What?"), prefix("a", "Why?")}) == 3


def test_parameters_of_transfers_are_refused_whatever_they_hold() -> None:
    for value in (b"null", b"{}", b"1"):
        with pytest.raises(ApiError, match="kv_transfer_params"):
            Prompt("/v1/completions", b'{"prompt": "a", "kv_transfer_params": %s}' % value)
