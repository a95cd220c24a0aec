"""Streams byte by byte on a raw socket;
clients that leave, deadlines, engines that die, servers that stop."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

pytestmark = pytest.mark.smoke

LONG = "a b c d " * 200


def chat(text: str, **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say:{text}"}], **others}


def post(server: ServedCore, path: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection with the request sent and nothing read."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_stream(connection: socket.socket) -> tuple[bytes, bytes]:
    """(head, body with the chunked coding taken off), up to the end of the response."""
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(65536)
        assert data, "the connection was closed before the end"
        received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return head, body


@pytest.fixture
def slow(scripts: Scripts) -> Iterator[ServedCore]:
    """A server of its own, whose engine takes its time and can be stopped."""
    core = ScriptedCore(scripts)
    core.step_seconds = 0.01
    with served(core, scripts.tokenizer, drain_timeout=0.3) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_frame_is_one_data_line_and_a_blank_one_and_done_is_last(server: ServedCore, path: str) -> None:
    body = chat("x y z", stream=True) if "chat" in path else {"prompt": "say:x y z", "stream": True}
    with post(server, path, body) as connection:
        head, stream = read_stream(connection)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\ncontent-type: text/event-stream; charset=utf-8" in head
    assert b"\r\ncontent-length" not in head
    assert stream.endswith(b"\n\ndata: [DONE]\n\n")
    *frames, last = stream.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    for frame in frames:
        assert frame.startswith(b"data: {") and b"\n" not in frame
        chunk = json.loads(frame[6:])
        assert "usage" not in chunk and len(chunk["choices"]) == 1
        assert "finish_reason" in chunk["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_aborted_in_the_engine(slow: ServedCore, stream: bool, begun: bool) -> None:
    slow.core.held = not begun
    connection = post(slow, "/v1/chat/completions", chat(LONG, stream=stream))
    slow.wait_until(lambda: len(slow.core.running) == 1)
    if begun and stream:
        connection.recv(1024)
    connection.close()
    slow.wait_until(lambda: not slow.core.running)
    assert len(slow.core.aborted) == 1
    slow.wait_until(lambda: not slow.run.service.admission.tickets)
    assert (
        slow.run.service.admission.num_completions == slow.run.service.admission.num_queued_prompt_tokens == 0
    )


def ended(server: ServedCore) -> dict[str, int]:
    """Counts of ended completions by their reason, and of requests by their time until the end."""
    registry = server.run.service.metrics.registry
    counts = {
        reason: registry.get_sample_value("minivllm_request_success_total", {"finished_reason": reason})
        for reason in ("stop", "length", "abort", "error")
    }
    counts["requests"] = registry.get_sample_value("minivllm_e2e_request_latency_seconds_count")
    return {name: int(count or 0) for name, count in counts.items()}


def test_every_end_of_a_request_is_in_the_counts(slow: ServedCore) -> None:
    before, expected = ended(slow), dict.fromkeys(("stop", "length", "abort", "error", "requests"), 0)

    def ends_as(reason: str, num_completions: int = 1) -> None:
        expected[reason] += num_completions
        expected["requests"] += 1
        counts = {name: before[name] + count for name, count in expected.items()}
        slow.wait_until(lambda: ended(slow) == counts)

    for stream in (False, True):
        for begun in (False, True):
            slow.core.held = not begun
            connection = post(slow, "/v1/completions", {"prompt": f"say:{LONG}", "n": 2, "stream": stream})
            slow.wait_until(lambda: len(slow.core.running) == 2)
            connection.close()
            ends_as("abort", 2)
    slow.core.held = False
    for wish, reason, fields in (
        ("a", "stop", {}),
        ("a b c", "length", {"max_tokens": 1}),
        ("REFUSE", "error", {}),
    ):
        with post(slow, "/v1/completions", {"prompt": f"say:{wish}", **fields}) as connection:
            assert connection.recv(65536)
        ends_as(reason)


def test_a_client_that_leaves_takes_all_its_completions_along(slow: ServedCore) -> None:
    connection = post(slow, "/v1/completions", {"prompt": [f"say:{LONG}"] * 3, "n": 2, "max_tokens": 900})
    slow.wait_until(lambda: len(slow.core.running) == 6)
    connection.close()
    slow.wait_until(lambda: not slow.core.running)
    assert len(slow.core.aborted) == 6


def test_a_reader_that_stalls_holds_a_bounded_buffer_and_then_gets_everything(slow: ServedCore) -> None:
    """While the client does not read, deltas merge:
    far fewer frames than tokens are made, and no text is lost."""
    slow.core.step_seconds = 0.0
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", slow.port))
    ids = [40, 41] * 1900
    slow.core.script = lambda request: ids
    data = json.dumps({"prompt": [5], "stream": True, "max_tokens": 3800, "logprobs": 20}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    slow.wait_until(lambda: len(slow.core.admitted) == 1 and not slow.core.running)
    _, stream = read_stream(connection)
    chunks = [json.loads(frame[6:]) for frame in stream.split(b"\n\n") if frame.startswith(b"data: {")]
    connection.close()
    tokens = [
        token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert len(tokens) == 3800
    assert len(chunks) < 3800


def test_a_deadline_ends_a_request_that_is_stuck_in_the_queue(scripts: Scripts) -> None:
    core = ScriptedCore(scripts)
    core.held = True
    with served(core, scripts.tokenizer, request_timeout=0.2) as server:
        for stream in (False, True):
            response = httpx.post(
                f"{server.url}/v1/chat/completions", json=chat("x", stream=stream), timeout=30
            )
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "timeout"
            assert response.headers["x-should-retry"] == "false"
        assert not core.running and len(core.aborted) == 2


def test_a_deadline_in_the_middle_of_a_stream_is_an_error_frame(scripts: Scripts) -> None:
    core = ScriptedCore(scripts)
    core.step_seconds = 0.02
    with served(core, scripts.tokenizer, request_timeout=0.3) as server:
        with post(server, "/v1/chat/completions", chat(LONG, stream=True)) as connection:
            _, stream = read_stream(connection)
        *_, error, done, _ = stream.split(b"\n\n")
        assert json.loads(error[6:])["error"]["code"] == "timeout"
        assert done == b"data: [DONE]"
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
            pytest.raises(openai.APIError, match=r"not done within 0.3 seconds"),
        ):
            list(
                client.completions.create(model="scripted", prompt=f"say:{LONG}", stream=True, max_tokens=500)
            )
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
            pytest.raises(openai.APIError, match=r"not done within 0.3 seconds"),
        ):
            list(client.responses.create(model="scripted", input=f"say:{LONG}", stream=True))
        assert not core.running


def test_the_engines_death_reaches_every_stream_and_health(slow: ServedCore) -> None:
    streams = [post(slow, "/v1/chat/completions", chat(LONG, stream=True)) for _ in range(3)]
    waiting = post(slow, "/v1/chat/completions", chat(LONG))
    slow.wait_until(lambda: len(slow.core.running) == 4)
    for connection in streams:
        connection.recv(10)
    slow.call(slow.core.die, "CUDA error at 0xdeadbeef")
    for connection in streams:
        _, body = read_stream(connection)
        error = json.loads(body.split(b"\n\n")[-3][6:])["error"]
        assert error["code"] == "engine_dead"
        assert "0xdeadbeef" not in error["message"]
        connection.close()
    assert waiting.recv(4096).startswith(b"HTTP/1.1 503 ")
    waiting.close()
    assert httpx.get(f"{slow.url}/health").status_code == 503
    assert httpx.get(f"{slow.url}/ready").status_code == 503
    assert httpx.post(f"{slow.url}/v1/chat/completions", json=chat("x")).status_code == 503


def test_draining_lets_requests_finish_and_takes_no_new_ones(slow: ServedCore) -> None:
    with post(slow, "/v1/chat/completions", chat("x y", stream=True)) as connection:
        slow.wait_until(lambda: len(slow.core.admitted) == 1)
        admission = slow.run.service.admission
        admission.is_draining = True
        refused = httpx.post(f"{slow.url}/v1/chat/completions", json=chat("x"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        assert httpx.get(f"{slow.url}/ready").status_code == 503
        assert httpx.get(f"{slow.url}/health").status_code == 200
        _, body = read_stream(connection)
        assert b'"finish_reason":"stop"' in body
        admission.is_draining = False


def test_what_does_not_finish_in_time_ends_with_an_error_frame(slow: ServedCore) -> None:
    with post(slow, "/v1/chat/completions", chat(LONG, stream=True)) as connection:
        connection.recv(10)
        slow.call(slow.run.begin_drain)
        _, body = read_stream(connection)
    error = json.loads(body.split(b"\n\n")[-3][6:])["error"]
    assert error["code"] == "shutting_down"
    slow.wait_until(lambda: not slow.core.running)


def test_every_frame_is_sent_at_once(server: ServedCore) -> None:
    """Without TCP_NODELAY, frames wait for the acknowledgement of the one before, 40 ms on most systems."""
    with post(server, "/v1/chat/completions", chat(LONG, stream=True)):
        state = server.run._server.server_state
        server.wait_until(lambda: bool(state.connections))
        for connection in list(state.connections):
            accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
