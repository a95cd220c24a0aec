"""What one body or one connection may ask of the server: each bound, with its status and its sentence."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm.server.limits.connections as connections
import minivllm.server.limits.middleware as middleware
from minivllm.server.answers import streaming
from minivllm.server.bodies import json_bounds
from minivllm.server.bodies.errors import ApiError
from minivllm.server.bodies.json_bounds import JsonBounds
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\[]{},:é\n')),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('a"\\:,{'), max_size=3), inner)
    ),
    max_leaves=25,
)


def measured(value: Any, depth: int = 0) -> tuple[int, int, int]:
    """(entries of all lists and objects and how many of those there are, keys, depth),
    by walking the value."""
    if not isinstance(value, (list, dict)):
        return 0, 0, depth
    inner = [measured(entry, depth + 1) for entry in (value.values() if isinstance(value, dict) else value)]
    values = max(0, len(value) - 1) + 1 + sum(one[0] for one in inner)
    keys = (len(value) if isinstance(value, dict) else 0) + sum(one[1] for one in inner)
    return values, keys, max([depth + 1, *(one[2] for one in inner)])


@given(value=JSON, chunk=st.integers(1, 40), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_scan_counts_what_the_parser_finds(
    value: Any, chunk: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    values, keys, depth = measured(value)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(json_bounds, "CHUNK_BYTES", chunk)
        JsonBounds(values, keys, depth).check(text)
        for tight in ((values - 1, keys, depth), (values, keys - 1, depth), (values, keys, depth - 1)):
            if min(tight) >= 0:
                with pytest.raises(ApiError, match=f"more than {min(tight)}|more than"):
                    JsonBounds(*tight).check(text)


@given(text=st.binary(max_size=200))
def test_the_scan_takes_any_bytes(text: bytes) -> None:
    JsonBounds(10**6, 10**6, 10**6).check(text)


@pytest.fixture(scope="module")
def http(server: ServedCore) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert len(response.content) < 2000
    return error


HEADERS = {"content-type": "application/json"}
TOO_COMPLEX = {
    "values": (b'{"prompt":[[' + b"-1," * 1_000_000 + b"1]]}", "more than 262144 values"),
    "lists": (b'{"prompt":[' + b"[]," * 1_000_000 + b"[]]}", "more than 262144 values"),
    "unknown keys": (
        b"{" + b",".join(b'"k%d":1' % number for number in range(280_000)) + b"}",
        "more than 32768 keys",
    ),
    "depth": (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 100 levels"),
}


@pytest.mark.parametrize("name", TOO_COMPLEX)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_a_body_that_holds_too_much_is_refused_before_it_is_parsed(
    http: httpx.Client, name: str, path: str
) -> None:
    content, sentence = TOO_COMPLEX[name]
    error = error_of(http.post(path, content=content, headers=HEADERS), 400)
    assert sentence in error["message"] and error["code"] == "body_too_complex"


@pytest.mark.parametrize(
    "encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32", "utf-8-sig", "latin-1"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_in_another_encoding_is_refused_before_it_is_parsed(
    http: httpx.Client, path: str, encoding: str
) -> None:
    """U+2200 has a byte that is a quote,
    so the bounds would take what is inside a text for what is outside."""
    character = "é" if encoding == "latin-1" else "\u2200"
    keys = ",".join(f'"k{number}":1' for number in range(40_000))
    for text in (f'{{"prompt":"{character}"}}', f'{{"user":"{character}",{keys}}}'):
        error = error_of(http.post(path, content=text.encode(encoding), headers=HEADERS), 400)
        assert error["code"] == "not_utf8"


@given(text=st.binary(max_size=60) | st.text(st.characters(codec="utf-8"), max_size=60).map(str.encode))
def test_what_passes_as_utf8_is_what_python_decodes_without_zero_bytes(text: bytes) -> None:
    def is_utf8() -> bool:
        try:
            decoded = text.decode()
        except UnicodeDecodeError:
            return False
        return "\0" not in decoded and not decoded.startswith("\ufeff")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "CHUNK_BYTES", 3)
        if is_utf8():
            json_bounds.check_utf8(text)
        else:
            with pytest.raises(ApiError, match="UTF-8"):
                json_bounds.check_utf8(text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[-1] * 100_000]}, "prompt.0.0"),
        ({"prompt": [["x"] * 100_000]}, "prompt"),
        ({"prompt": [[-1]] * 2000}, "prompt.0.0"),
        ({"prompt": "x", **{f"k{number}": 1 for number in range(30_000)}}, "k0"),
        ({"prompt": "x", "logit_bias": {f"k{number}": "x" for number in range(30_000)}}, "logit_bias"),
        ({"prompt": "x", "vllm_xargs": {f"k{number}": {} for number in range(30_000)}}, "vllm_xargs"),
        ({"prompt": "x", "stop_token_ids": ["x"] * 100_000}, "stop_token_ids.0"),
        ({"prompt": "x", "allowed_token_ids": [-1] * 100_000}, "allowed_token_ids.0"),
    ],
)
def test_a_body_with_many_mistakes_is_answered_with_a_few(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["param"].startswith(param)


def test_a_text_no_prompt_could_hold_is_not_tokenized(http: httpx.Client) -> None:
    error = error_of(http.post("/tokenize", json={"prompt": "x " * 1_900_000}), 400)
    assert error["message"].startswith("prompt has 3800000 characters, but may have at most")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_schema_as_a_text_has_the_bounds_of_a_body(http: httpx.Client, path: str) -> None:
    text = '{"a":' + "[" * 101 + "]" * 101 + "}"
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    error = error_of(http.post(path, json={**prompt, "structured_outputs": {"json": text}}), 400)
    assert error["message"].startswith("structured_outputs.json has more than 100 levels")


def test_memory_goes_back_once_after_requests(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    time.sleep(2 * middleware.TRIM_SECONDS)  # other servers of these tests may have requests behind them
    monkeypatch.setattr(
        middleware, "return_freed_memory", lambda: returned.append(threading.current_thread().name)
    )
    monkeypatch.setattr(middleware, "TRIM_SECONDS", 2.0)
    with (
        served(ScriptedCore(scripts), scripts.tokenizer) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for size in (100, 33_000, 33_000):
            assert client.post("/tokenize", json={"prompt": "x " * size}).status_code < 500
        server.wait_until(lambda: returned)
        time.sleep(0.2)
        assert len(returned) == 1 and returned[0].startswith("asyncio"), "once for all, and beside the loop"
        assert client.get("/ready").status_code == 200
        time.sleep(2.5)
        assert len(returned) == 1, "no body, no memory"


def test_many_wrong_messages_are_answered_with_a_few(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "txt": 1}] * 1000}] * 7
    error = error_of(http.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["param"].startswith("messages.0.content.0")


def test_bodies_are_bounded_in_all(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.server.app.MAX_TOTAL_BODY_BYTES", 4096)
    core = ScriptedCore(scripts)
    core.held = True
    with served(core, scripts.tokenizer, max_body_bytes=2048) as server:
        waiting = [_send(server, {"prompt": "x " * 700}) for _ in range(2)]
        server.wait_until(lambda: len(core.running) == 2)
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x " * 700})
        assert "4096 bytes in all" in error_of(response, 429)["message"]
        assert response.headers["retry-after"] == "1"
        core.held = False
        for connection in waiting:
            assert connection.recv(64).startswith(b"HTTP/1.1 200 ")
            connection.close()
        server.wait_until(
            lambda: httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
        )


def _send(server: ServedCore, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return _raw(server, head % len(data) + data)


def _raw(server: ServedCore, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(data)
    return connection


def _read_all(connection: socket.socket) -> bytes:
    received = b""
    with connection:
        while data := connection.recv(65536):
            received += data
    return received


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        b"HTTP/1.0\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6",
        b"HTTP/1.1\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"HTTP/1.1\r\nContent-Length: -1",
        b"HTTP/1.1\r\nContent-Length: +5",
    ],
)
def test_a_body_whose_end_is_ambiguous_is_refused_and_nothing_behind_it_read(
    server: ServedCore, head: bytes
) -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    request = (
        b"POST /v1/completions "
        + head.replace(b"\r\n", b"\r\nHost: localhost\r\n", 1)
        + b"\r\n\r\n"
        + smuggled
    )
    answer = _read_all(_raw(server, request))
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.fixture(scope="module")
def strict(scripts: Scripts) -> Iterator[ServedCore]:
    """A server whose clients have no time to lose."""
    patch = pytest.MonkeyPatch()
    defaults = {"head_seconds": 0.3, "body_seconds": 0.6, "write_seconds": 0.5, "max_connections": 5}
    real = connections.ConnectionLimits
    patch.setattr("minivllm.server.run.ConnectionLimits", lambda: real(**defaults))
    with served(
        ScriptedCore(scripts, max_model_len=100_000), scripts.tokenizer, request_timeout=30
    ) as running:
        patch.undo()  # other servers have the usual limits
        yield running


@pytest.mark.parametrize(
    ("begun", "what"),
    [
        (b"", "head"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", "head"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", "body"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n1\r\n{\r\n",
            "body",
        ),
    ],
)
def test_a_request_that_does_not_arrive_ends_its_connection(
    strict: ServedCore, begun: bytes, what: str
) -> None:
    answer = _read_all(_raw(strict, begun))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert f"The {what} of the request did not arrive".encode() in answer


@pytest.mark.parametrize(
    "head", [b"nonsense", b"GET / HTTP/1.1", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000]
)
def test_what_is_no_request_is_refused_in_the_form_of_all_errors(server: ServedCore, head: bytes) -> None:
    connection = _raw(server, head + b"\r\n\r\n")
    received = connection.recv(65536)
    connection.close()
    assert (
        received.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"content-type: application/json" in received
    )
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_bytes_that_trickle_in_win_no_time(strict: ServedCore) -> None:
    connection = _raw(strict, b"POST / HTTP/1.1\r\nHost: localhost\r\n")
    start = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - start < 20:
            connection.sendall(b"a: b\r\n")
            time.sleep(0.05)
    connection.close()


def test_of_too_many_connections_the_one_that_waited_longest_ends(strict: ServedCore) -> None:
    waiting = [_raw(strict, b"") for _ in range(12)]
    assert httpx.get(f"{strict.url}/ready").status_code == 200
    answer = _read_all(waiting[0])
    assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in answer and b"5 connections" in answer
    for connection in waiting[1:]:
        connection.close()


READY = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@contextmanager
def busy(server: ServedCore) -> Iterator[None]:
    """The server's event loop stands still for the length of the block."""
    free = threading.Event()
    server.call(free.wait, 30)
    try:
        yield
    finally:
        free.set()


def test_a_connection_whose_request_waits_to_be_read_is_not_idle(strict: ServedCore) -> None:
    """All of them are accepted before any is read."""
    strict.wait_until(lambda: not strict.run._server.server_state.connections)
    with busy(strict):
        asking = [_raw(strict, READY) for _ in range(5)]
        refused = [_raw(strict, b"") for _ in range(2)]
    assert [_read_all(one)[9:12] for one in asking] == [b"200"] * 5
    assert [_read_all(one)[9:12] for one in refused] == [b"429"] * 2


def test_a_body_that_has_arrived_is_not_late_because_the_server_is_busy(strict: ServedCore) -> None:
    body = b'{"prompt": "x"' + b" " * 20_000 + b"}"
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: "
        b"close\r\n"
    )
    connection = _raw(strict, head + b"Content-Length: %d\r\n\r\n" % len(body))
    strict.wait_until(
        lambda: any(one._waits_for == "body" for one in strict.run._server.server_state.connections)
    )
    with busy(strict):
        connection.sendall(body)
        time.sleep(0.7)  # the time for a body passes
    assert _read_all(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("number", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_burst_of_connections_is_served_while_the_queue_has_room(scripts: Scripts, number: int) -> None:
    """The client connects them all before it sends the first request."""
    body = b'{"prompt": "say:one", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

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

    core = ScriptedCore(scripts, max_num_seqs=64)
    with served(core, scripts.tokenizer, max_queued_requests=number) as server:
        assert asyncio.run(ask_all(server.port)) == {b"200"}


def test_as_many_connections_are_taken_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    infinite = connections.resource.RLIM_INFINITY
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, limits: asked.append(limits))

    def number(soft: int, hard: int, files: int = 1) -> int:
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, hard))
        return connections.max_connections(files)

    assert (
        number(1024, 10**6)
        == number(10**6, 10**6)
        == number(infinite, infinite)
        == connections.MAX_CONNECTIONS
    )
    assert asked == [(connections.MAX_CONNECTIONS + connections.OTHER_FILES, 10**6)], (
        "raised where it is too low"
    )
    assert number(1024, 1024) == 1024 - connections.OTHER_FILES
    assert number(1024, 1024, files=3) == (1024 - connections.OTHER_FILES) // 3
    assert number(1024, infinite, files=3) == connections.MAX_CONNECTIONS
    assert len(asked) == 2


def test_a_kept_connection_serves_on_after_a_pause(strict: ServedCore) -> None:
    with httpx.Client(base_url=strict.url) as http:
        assert http.get("/ready").status_code == 200
        time.sleep(0.5)
        assert http.get("/ready").status_code == 200


def _stalled_stream(server: ServedCore) -> socket.socket:
    """A stream of more megabytes than the system buffers, whose reader reads nothing."""
    token_ids = [40, 41] * 45_000
    server.core.script = lambda request: token_ids
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps({"prompt": [5], "stream": True, "max_tokens": 90_000, "logprobs": 90}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(data) + data)
    return connection


def test_a_reader_that_has_stopped_reading_loses_its_place(strict: ServedCore) -> None:
    num_admitted = len(strict.core.admitted)
    connection = _stalled_stream(strict)
    strict.wait_until(lambda: len(strict.core.admitted) > num_admitted)
    admission = strict.run.service.admission
    strict.wait_until(lambda: admission.num_completions == 0 and not strict.core.running)
    strict.wait_until(lambda: not strict.run._server.server_state.connections)
    assert len(strict.core.admitted) == num_admitted + 1, "it ran, and nothing took its place meanwhile"
    with httpx.Client(base_url=strict.url) as http:
        assert http.get("/ready").status_code == 200, "the place is free for others"
    connection.close()


def test_for_a_reader_that_does_not_read_little_is_written_out(
    strict: ServedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    frames_of = streaming.EventStream._send_frames

    async def counted(self: Any, scope: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            sizes.append(len(message["body"]))
            await send(message)

        await frames_of(self, scope, count)

    monkeypatch.setattr(streaming.EventStream, "_send_frames", counted)
    num_admitted = len(strict.core.admitted)
    connection = _stalled_stream(strict)
    strict.wait_until(lambda: len(strict.core.admitted) > num_admitted)
    strict.wait_until(lambda: strict.run.service.admission.num_completions == 0)
    *before, held = sizes  # the last one waited to be sent, and had gathered what came meanwhile
    assert before and sum(before) <= 12 * connections.UNREAD_BYTES, (before, held)
    connection.close()


class PausedReader:
    """The connection of a stream, as uvicorn has it:
    what is to be sent waits, until the connection is lost."""

    def __init__(self) -> None:
        self._is_lost, self._may_go_on = asyncio.Event(), asyncio.Event()
        self.num_sent = 0

    async def receive(self) -> dict[str, Any]:
        await self._is_lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.num_sent += 1
        if self.num_sent > 3:
            await self._may_go_on.wait()

    def lose(self) -> None:
        self._is_lost.set()
        self._may_go_on.set()


def test_nothing_is_written_out_for_a_reader_whose_connection_has_ended() -> None:
    """What gathered for a reader that had stopped reading may be a thousand tokens,
    and as many readers may end at once."""

    async def main() -> tuple[int, int, bool]:
        reader, num_built, is_closed = PausedReader(), 0, False

        async def frames() -> Any:
            nonlocal num_built, is_closed
            try:
                while True:
                    num_built += 1
                    yield b"data: x"
            finally:
                is_closed = True

        scope: Any = {}
        stream = streaming.EventStream(b"first", frames(), on_error=lambda error: b"")
        served = asyncio.create_task(stream(scope, reader.receive, reader.send))
        while reader.num_sent < 4:
            await asyncio.sleep(0)
        before = num_built
        reader.lose()
        await served
        assert scope["minivllm.client_left"] and is_closed
        return before, num_built, is_closed

    before, after, _ = asyncio.run(main())
    assert before == after == 2


CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
    b"chunked\r\n"
)


def _in_chunks(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return CHUNKED + b"Connection: close\r\n\r\n" + framed + b"0\r\n\r\n"


def test_a_body_in_chunks_of_one_byte_is_refused_before_much_of_it_is_taken_apart(
    server: ServedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_apart: list[int] = []
    end = connections.BoundedConnection._end

    def noted(self: Any, *reasons: Any) -> None:
        taken_apart.append(self.conn.num_chunks)
        end(self, *reasons)

    monkeypatch.setattr(connections.BoundedConnection, "_end", noted)
    connection = _raw(server, b"")
    with suppress(OSError):
        connection.sendall(_in_chunks(b'{"prompt":"' + b" " * 300_000 + b'"}', 1))
    with suppress(OSError):
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"too many small chunks" in answer
    connection.close()
    server.wait_until(lambda: taken_apart)
    per_read = connections.READ_BYTES // len(b"1\r\n \r\n") + 1
    assert taken_apart == [pytest.approx(connections.MAX_SMALL_CHUNKS, abs=2 * per_read)]


@pytest.mark.parametrize(("length", "size"), [(4000, 1), (200_000, 70), (200_000, 65536)])
def test_a_body_in_few_or_large_chunks_is_read(server: ServedCore, length: int, size: int) -> None:
    body = json.dumps({"prompt": "x " * 20, "model": None}).encode()
    answer = _read_all(_raw(server, _in_chunks(body + b" " * (length - len(body)), size)))
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"tokens"' in answer


def test_the_engine_ends_a_request_at_its_deadline_though_nobody_reads(scripts: Scripts) -> None:
    """The connection may wait for its reader a little longer; the KV cache does not."""
    core = ScriptedCore(scripts, max_model_len=100_000)
    patch = pytest.MonkeyPatch()
    with patch.context() as context, served(core, scripts.tokenizer, request_timeout=3.0) as server:
        context.setattr(connections.BoundedConnection, "_stalled", lambda self: None)
        connection = _stalled_stream(server)
        server.wait_until(lambda: len(core.running) == 1)
        server.wait_until(lambda: not core.running)
        assert len(core.aborted) == 1
        connection.close()


def test_depth_is_counted_by_brute_force_too() -> None:
    text = '[[{"a":[1]}],[[[]]]]'
    depth = max(accumulate((character in "[{") - (character in "]}") for character in text))
    JsonBounds(max_depth=depth).check(text.encode())
    with pytest.raises(ApiError):
        JsonBounds(max_depth=depth - 1).check(text.encode())


def test_a_client_that_is_refused_for_all_bodies_together_may_send_to_its_end_and_reads_the_answer() -> None:
    """Over a socket whose buffers do not hold the body: closing it early would cost the client the answer."""
    import uvicorn

    async def no_app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the body is refused")

    bounds = JsonBounds(max_values=10, max_keys=10, max_depth=10)
    limit = middleware.BodyLimit(no_app, 32 * 2**20, 2**16, bounds)
    server = uvicorn.Server(uvicorn.Config(limit, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        body = b"1" * (24 * 2**20)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            for first in range(0, len(body), 2**20):
                client.sendall(body[first : first + 2**20])
                time.sleep(0.01)
            answer = client.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in answer
    finally:
        server.should_exit = True
        thread.join(10)
