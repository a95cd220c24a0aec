"""One hostile client at a time beside a well-behaved one, against the server's own process.

Prints, per case, the longest gap in the other client's stream, the worst answer time of ``/ready``, and the
memory of server and engine before, at most, and after.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.test_process import Command

MAX_SECONDS = 30.0
"""What one case may take."""
HANG_SECONDS = 5.0
"""A gap that no busy machine explains."""
MEMORY_SHARE = 0.25
"""By how much a case may leave the server larger than it was, two seconds later: more would be a leak. 10 %
is the aim, and the table shows what it is."""
NUM_VALUES = 1_000_000
TOKENS = 400


def request(path: str, body: bytes | dict[str, Any], *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


@dataclass
class Site:
    """Where the server listens."""

    port: int

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(MAX_SECONDS)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def ask(self, data: bytes) -> bytes:
        """Send a request and read the answer to its end; what there was if the server ends the connection."""
        received = bytearray()
        with self.connect() as connection, suppress(OSError):
            connection.sendall(data)
            while piece := connection.recv(2**18):
                received += piece
        return bytes(received)

    def ask_all(
        self, requests: list[bytes], expected: tuple[bytes, ...] = (b"200", b"400", b"429", b"504")
    ) -> None:
        with ThreadPoolExecutor(len(requests)) as pool:
            for answer in pool.map(self.ask, requests):
                assert answer[9:12] in expected, answer[:500]


class Bystander:
    """A client that streams, and one that asks whether the server is ready, as long as the block lasts."""

    def __init__(self, site: Site, processes: list[psutil.Process]) -> None:
        self._site, self._processes = site, processes
        self._ended = threading.Event()
        self.longest_gap = self.worst_ready = 0.0
        self.peak_rss = 0
        self.num_chunks = 0
        self.errors: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        threads = [threading.Thread(target=work) for work in (self._stream, self._ask_ready)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(1.0)
            yield
            time.sleep(0.5)
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(MAX_SECONDS)
        assert not self.errors, self.errors

    def rss(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    def _stream(self) -> None:
        fields = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        last: float | None = None
        while not self._ended.is_set():
            with self._site.connect() as connection:
                connection.sendall(request("/v1/completions", fields))
                received = b""
                while piece := connection.recv(65536):
                    now = time.perf_counter()
                    if last is not None:
                        self.longest_gap = max(self.longest_gap, now - last)
                    last = now
                    self.num_chunks += 1
                    received = (received + piece)[-200:]
                    if self._ended.is_set():
                        return
                if b"[DONE]" not in received:
                    self.errors.append(received.decode(errors="replace"))
                    return

    def _ask_ready(self) -> None:
        while not self._ended.wait(0.02):
            start = time.perf_counter()
            answer = self._site.ask(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            self.worst_ready = max(self.worst_ready, time.perf_counter() - start)
            self.peak_rss = max(self.peak_rss, self.rss())
            if b" 200 " not in answer[:20]:
                self.errors.append(answer[:300].decode(errors="replace"))
                return


def nothing(site: Site) -> None:
    time.sleep(5.0)


def honest_requests(site: Site) -> None:
    """One of each kind of request, so that what a kind loads or sets up once does not count as an attack's
    memory."""
    schema = {"type": "object", "properties": {"field": {"type": "string", "pattern": "(a|b){2,9}"}}}
    fields: list[dict[str, Any]] = [
        {"logprobs": 100, "echo": True, "n": 8},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"regex": "(a{1,9}b?){1,9}"}},
    ]
    bodies = [request("/v1/completions", {"prompt": [5] * 500, "max_tokens": 20, **some}) for some in fields]
    site.ask_all(bodies)
    site.ask_all([request("/v1/embeddings", {"input": ["some words to embed " * 20] * 8})])


def repeated(path: str, body: bytes | dict[str, Any], times: int = 3) -> Callable[[Site], None]:
    data = request(path, body)

    def attack(site: Site) -> None:
        for _ in range(times):
            site.ask_all([data])

    return attack


def stalled_readers(site: Site) -> None:
    """60 clients ask for long streams and read nothing, until the server lets go of them."""
    fields = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20}
    connections = [site.connect(receive_buffer=4096) for _ in range(60)]
    for connection in connections:
        connection.sendall(request("/v1/completions", fields))
    time.sleep(12.0)
    for connection in connections:
        connection.close()


def slow_arrivals(begun: bytes, number: int) -> Callable[[Site], None]:
    def attack(site: Site) -> None:
        connections = [site.connect() for _ in range(number)]
        for connection in connections:
            connection.sendall(begun)
        end = time.monotonic() + 8.0
        while time.monotonic() < end:
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b"a")
            time.sleep(0.2)
        for connection in connections:
            connection.close()

    return attack


def tiny_chunks(site: Site) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with site.connect() as connection, suppress(OSError):
        connection.settimeout(8.0)
        connection.sendall(head + b"1\r\n \r\n" * 300_000)


def grammars(site: Site) -> None:
    def expensive(number: int) -> dict[str, Any]:
        properties = {
            f"field{number}_{place}": {"type": "string", "pattern": f"(a|b){{{place},200}}"}
            for place in range(60)
        }
        return {
            "prompt": [5],
            "max_tokens": 2,
            "structured_outputs": {"json": {"type": "object", "properties": properties}},
        }

    bodies = [expensive(number) for number in range(20)]
    bodies += [
        {
            "prompt": [5],
            "max_tokens": 2,
            "structured_outputs": {"regex": f"({number}(a{{1,500}}b?){{1,500}})+"},
        }
        for number in range(5)
    ]
    # Which of them are refused, and how, is the compiler's business.
    site.ask_all(
        [request("/v1/completions", body) for body in bodies], (b"200", b"400", b"429", b"500", b"504")
    )


def cases() -> dict[str, Callable[[Site], None]]:
    """By name, what a hostile client does."""
    long = "The quick brown fox jumps over 13 lazy dogs, isn't it? " * 70_000
    word = "".join(chr(97 + number * number % 23) for number in range(3_500_000))
    begun_body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":[' + "[]," * 1_000_000 + "[]]}"},
    }
    return {
        "nobody": nothing,
        "wrong values, 3 MB": repeated("/v1/completions", b'{"prompt":[[' + b"-1," * NUM_VALUES + b"1]]}"),
        "wrong values, below the bound": repeated("/v1/completions", {"prompt": [[-1] * 250_000]}),
        "280k unknown keys": repeated("/v1/completions", {f"k{number}": 1 for number in range(280_000)}),
        "unknown keys, below the bound": repeated(
            "/v1/completions", {f"k{number}": 1 for number in range(32_000)}
        ),
        "100k levels": repeated("/v1/completions", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "a prompt of 4 MB": repeated("/v1/completions", {"prompt": long}),
        "one word of 3.5 MB": repeated("/v1/completions", {"prompt": word}),
        "a message of 4 MB": repeated(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}
        ),
        "special tokens, 3 MB": repeated(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>" * 300_000}]}
        ),
        "tokenize 4 MB": repeated("/tokenize", {"prompt": long, "return_token_strs": True}),
        "detokenize 250k": repeated("/detokenize", {"tokens": [5] * 250_000}),
        "arguments of 3 MB": repeated(
            "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        ),
        "1400 embeddings": repeated("/v1/embeddings", {"input": ["some words to embed " * 20] * 1400}, 1),
        "long log-probabilities": repeated(
            "/v1/completions",
            {"prompt": [5] * 500, "max_tokens": 1000, "n": 8, "logprobs": 100, "echo": True},
            1,
        ),
        "60 stalled readers": stalled_readers,
        "200 slow headers": slow_arrivals(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nX: ", 200),
        "200 slow bodies": slow_arrivals(begun_body, 200),
        "chunks of one byte": tiny_chunks,
        "25 expensive grammars": grammars,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hostile_client_holds_up_nobody_else(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    flags = ["--max-model-len", "4096", "--num-gpu-blocks-override", "12000", "--max-num-seqs", "96"]
    command = Command(
        tiny_model("llama", max_position_embeddings=8192), tmp_path / "log", *flags, "--request-timeout", "10"
    )
    try:
        server = psutil.Process(command.process.pid)
        site = Site(int(command.url.rpartition(":")[2]))
        processes = [server, *server.children(recursive=True)]
        honest_requests(site)
        nothing(site)
        print(
            f"\n{'case':32}{'gap ms':>8}{'ready ms':>10}{'MB before':>11}{'peak':>7}{'after':>7}{'seconds':>9}"
        )
        for name, attack in cases().items():
            watch = Bystander(site, processes)
            before, start = watch.rss(), time.monotonic()
            with watch.watching():
                attack(site)
            seconds = time.monotonic() - start
            time.sleep(2.0)
            sizes = [round(size / 2**20) for size in (before, watch.peak_rss, watch.rss())]
            gap, ready = round(watch.longest_gap * 1000), round(watch.worst_ready * 1000)
            print(
                f"{name:32}{gap:8}{ready:10}{sizes[0]:11}{sizes[1]:7}{sizes[2]:7}{seconds:9.1f}", flush=True
            )
            assert watch.num_chunks > 0
            assert watch.rss() < (1 + MEMORY_SHARE) * before, f"{name}: memory does not return"
            assert max(watch.longest_gap, watch.worst_ready) < HANG_SECONDS, f"{name}: the server stood still"
    finally:
        command.process.kill()
        command.process.wait(30)
