"""A request's way through the proxy: one token from a prefill server, then the answer from a decode server.

The prompt goes to both as the client wrote it. The decode server finds the blocks under their hashes, so no
parameters travel, and there is nothing that a client could forge. Whatever goes wrong with prefill, the
decode server computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from minivllm.server.answers.streaming import DONE, EventStream, data_frame, event_frame, while_connected
from minivllm.server.bodies.errors import ApiError, error_response
from minivllm.server.limits.middleware import LARGE_BODY_BYTES
from minivllm.server.proxy.pool import Backend, Pool
from minivllm.server.proxy.prompts import Prompt

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
ATTEMPTS = 2
"""Servers of each kind that a request is sent to: one that kills its server must not kill all of them."""
CONNECT_SECONDS = 5.0
MAX_CONNECTING = 32
"""Connections to servers that are being made at a time:
of a burst of thousands, some would be late by themselves."""
PROBE_SECONDS = 1.0
"""A server that failed must answer under /ready within this time before it gets a request again."""
FORWARDED = frozenset(
    (b"authorization", b"content-type", b"x-request-id", b"traceparent", b"tracestate", b"accept")
)
RETURNED = (
    "content-type",
    "content-encoding",
    "retry-after",
    "x-should-retry",
    "www-authenticate",
    "accept-encoding",
)
STATUSES = range(200, 600)
"""Statuses of an answer."""
BUSY, UNAVAILABLE = 429, (502, 503)


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """prefill, decode: addresses of servers. min_prefill_tokens: shorter prompts, about, go to a decode
    server alone. prefill_timeout: seconds after which the decode server computes the prompt instead; the
    prefill server is then left out until it answers again. timeout: seconds that a server may be silent."""

    prefill: Sequence[str]
    decode: Sequence[str]
    min_prefill_tokens: int = 256
    prefill_timeout: float = 60.0
    timeout: float = 600.0


class ProxyMetrics:
    """ways: requests by the way they went. errors: HTTP requests that failed, by class."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ways = self._counter("proxy_requests", "Requests by the way they went.", "way")
        self.errors = self._counter("request_errors", "HTTP requests that failed, by class.", "error_class")
        for way in ("prefill", "decode_alone", "prefill_failed"):
            self.ways.labels(way)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"minivllm_{name}", text, [label], registry=self.registry)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class ConnectPlaces:
    """Lets few requests connect at a time.
    A trace of httpx, which is called before and after each of their steps.

    The time limit of a connection begins when it has a place.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_CONNECTING)

    async def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            await self._places.acquire()
        elif event in ("connection.connect_tcp.complete", "connection.connect_tcp.failed"):
            self._places.release()


class Relay:
    """The servers of a proxy, and the connections to them."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self.prefill = Pool(settings.prefill)
        self.decode = Pool(settings.decode)
        self.metrics = ProxyMetrics()
        self._extensions = {"trace": ConnectPlaces()}
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def generate(self, request: Request) -> Response:
        """Answer a request to a generating path. Raises ApiError, or ClientLeft."""
        path, body = request.scope["path"], await request.body()
        large = len(body) > LARGE_BODY_BYTES
        prompt = await asyncio.to_thread(Prompt, path, body) if large else Prompt(path, body)
        headers = _forwarded(request)
        return await while_connected(request.receive, self._generate(path, body, prompt, headers))

    async def _generate(self, path: str, body: bytes, prompt: Prompt, headers: Headers) -> Response:
        way = "decode_alone"
        if prompt.num_tokens >= self._settings.min_prefill_tokens and self.prefill.backends:
            way = "prefill" if await self._prefill(path, prompt, headers) else "prefill_failed"
        self.metrics.ways.labels(way).inc()
        return await self._decode("POST", path, body, headers, prompt.prefix)

    async def _prefill(self, path: str, prompt: Prompt, headers: Headers) -> bool:
        """Have the prompt computed; whether that went well. A refusal is left to the decode server to tell.

        A server that has failed rests, and is then tried by one request at a time.
        """
        body, tried = prompt.for_prefill(), list[Backend]()
        limit = self._settings.prefill_timeout
        try:
            async with asyncio.timeout(limit):
                while len(tried) < ATTEMPTS and (
                    backend := self.prefill.pick(prompt.prefix, tried, may_rest=False)
                ):
                    tried.append(backend)
                    if backend.has_failed:
                        backend.rest(limit + PROBE_SECONDS)
                        if not await self._is_ready(backend, "/ready", PROBE_SECONDS):
                            continue
                    try:
                        with backend.working():
                            response = await self._client.post(
                                backend.url + path, content=body, headers=headers, extensions=self._extensions
                            )
                    except httpx.HTTPError as error:
                        _failed(backend, "prefill", repr(error))
                        continue
                    if response.status_code in UNAVAILABLE:
                        _failed(backend, "prefill", f"it answers {response.status_code}")
                        continue
                    backend.works()
                    if response.is_success:
                        return True
                    if response.status_code != BUSY:
                        return False
        except TimeoutError:
            _failed(tried[-1], "prefill", f"it took longer than {limit:g} s")
        finally:
            for one in tried:
                if one.has_failed:
                    one.rest()
        return False

    async def _decode(self, method: str, path: str, body: bytes, headers: Headers, prefix: bytes) -> Response:
        """The answer of a decode server; of another one if nothing has come from the first.
        Raises ApiError."""
        tried: list[Backend] = []
        refusal: Response | None = None
        while len(tried) < ATTEMPTS and (backend := self.decode.pick(prefix, tried)):
            tried.append(backend)
            if backend.has_failed and not await self._is_ready(backend, "/ready", PROBE_SECONDS):
                backend.rest()
                continue
            request = self._client.build_request(
                method, backend.url + path, content=body, headers=headers, extensions=self._extensions
            )
            try:
                with ExitStack() as until_end:
                    until_end.enter_context(backend.working())
                    answer = await self._answer(path, request, until_end)
            except httpx.HTTPError as error:
                _failed(backend, "decode", repr(error))
                continue
            if answer.status_code in UNAVAILABLE:
                _failed(backend, "decode", f"it answers {answer.status_code}")
            else:
                backend.works()
                if answer.status_code != BUSY:
                    return answer
            refusal = answer
        if refusal is not None:
            return refusal
        raise unreachable()

    async def _answer(self, path: str, request: httpx.Request, until_end: ExitStack) -> Response:
        """An answer in one piece, or a stream whose first piece is there.
        until_end: closed when the answer is over."""
        response = await self._client.send(request, stream=True)
        response.headers.encoding = "latin-1"  # so that they go on as they came
        returned = {name: response.headers[name] for name in RETURNED if name in response.headers}
        is_stream = response.status_code == 200 and returned.get("content-type", "").startswith(
            "text/event-stream"
        )
        try:
            if response.status_code not in STATUSES:
                return error_response(no_answer(response.status_code))
            if not is_stream:
                body = b"".join([piece async for piece in response.aiter_raw()])
                return Response(body, response.status_code, headers=returned)
            frames = _frames(response, until_end.pop_all())
            try:
                stream = EventStream(await anext(frames), frames, partial(_error_frames, path))
            except StopAsyncIteration:
                raise httpx.RemoteProtocolError("a stream without a piece") from None
            stream.headers.update(returned)
            return stream
        finally:
            if not is_stream:
                await response.aclose()

    async def forward(self, request: Request) -> Response:
        """Have a decode server answer, whatever it is about."""
        body = await request.body()
        work = self._decode(request.method, _escaped_path(request), body, _forwarded(request), body[:64])
        return await while_connected(request.receive, work)

    async def are_ready(self, pool: Pool, path: str) -> list[bool]:
        """Which servers answer 200 under /health or /ready."""

        ready = (self._is_ready(one, path, CONNECT_SECONDS) for one in pool.backends)
        return list(await asyncio.gather(*ready))

    async def _is_ready(self, backend: Backend, path: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return (await self._client.get(backend.url + path)).is_success
        except (httpx.HTTPError, TimeoutError):
            return False


async def _frames(response: httpx.Response, until_end: ExitStack) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream as they come.
    Raises ApiError if it breaks off; closed early, it ends the request."""
    try:
        with until_end:
            has_begun = False
            try:
                async for piece in response.aiter_raw():
                    has_begun = True
                    yield piece
            except httpx.HTTPError:
                if not has_begun:
                    raise
                raise broken_off() from None
    finally:
        await response.aclose()


def _error_frames(path: str, error: ApiError) -> bytes:
    """How a stream ends that breaks off."""
    if path == "/v1/responses":
        detail = error.detail
        named = {
            "code": detail["code"],
            "message": detail["message"],
            "param": detail["param"],
            "error": detail,
        }
        return event_frame("error", {"type": "error", **named})
    return data_frame(error.body) + DONE


def _forwarded(request: Request) -> Headers:
    return [(name, value) for name, value in request.headers.raw if name in FORWARDED] + [
        (b"accept-encoding", b"identity")
    ]


def _escaped_path(request: Request) -> str:
    """The path of a request, with everything escaped that a URL could mean otherwise. Raises ApiError 404."""
    path: str = request.scope["path"]
    if not {".", ".."}.isdisjoint(path.split("/")):
        # Whatever reads the URL next would take them out,
        # and find another path than the one that is allowed here.
        raise ApiError(404, "There is no path here with a part '.' or '..'.", code="not_found")
    return quote(path)


def _failed(backend: Backend, kind: str, why: str) -> None:
    logger.warning("The %s server at %s failed: %s.", kind, backend.url, why)
    backend.rest()


def unreachable() -> ApiError:
    message = "No decode server can be reached: try again later."
    return ApiError(503, message, type="server_error", code="no_decode_server", headers={"retry-after": "5"})


def no_answer(status: int) -> ApiError:
    message = f"A decode server answered with the status {status}, which no answer can have: try again later."
    return ApiError(502, message, type="server_error", code="bad_decode_server")


def broken_off() -> ApiError:
    return ApiError(
        502, "The server that wrote this answer has gone.", type="server_error", code="decode_server_lost"
    )
