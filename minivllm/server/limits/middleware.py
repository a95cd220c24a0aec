"""Middleware before and after every endpoint: request id, access log, size limit, key."""

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.device.freed_memory import return_freed_memory
from minivllm.server.bodies.errors import ApiError, error_response
from minivllm.server.bodies.json_bounds import JsonBounds, check_utf8

access_logger = logging.getLogger("minivllm.server.access")

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Answered without a key; "/" is a page without data.
Everything else needs one, paths that do not exist too."""
LARGE_BODY_BYTES = 65536
"""From here on, work on a body leaves the event loop,
and waits for other large bodies instead of small ones."""
TRIM_SECONDS = 0.5
"""After a request with a large body, or the last one of several,
until the memory that they took goes back. Requests in between share that."""
DISCARD_SECONDS = 5.0
"""The longest that the rest of a refused body is waited for."""
body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)
"""Length of the body of the request that is being served."""
_ECHOED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class CountsErrors(Protocol):
    """errors: by the label "error_class"."""

    @property
    def errors(self) -> Counter: ...


class AccessLog:
    """Gives every request an id, echoes the client's own, and logs method, path, status and time;
    never a body.

    HEAD is answered like GET: the connection leaves the body out.
    """

    def __init__(self, app: ASGIApp, metrics: CountsErrors) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, method = time.monotonic(), scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy, for the connection goes by what was asked
        request_id = _header(scope, b"x-request-id") or b""
        if not _ECHOED_ID.fullmatch(request_id):
            request_id = b"req-" + secrets.token_hex(12).encode()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope.get("minivllm.client_left"):
                status = 499
            if status >= 400:
                self._metrics.errors.labels(ApiError(status, "").error_class).inc()
            elif "minivllm.stream_error" in scope:
                self._metrics.errors.labels(scope["minivllm.stream_error"]).inc()
            seconds = time.monotonic() - start
            fields = {
                "method": method if method.isalpha() else "?",
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 4),
                "request_id": request_id.decode(),
            }
            access_logger.info("%s %r %d in %.3f s (%s)", *fields.values(), extra={"fields": fields})


class RequireKey:
    """Refuses whatever carries none of the keys, by the path the server itself routes on. Preflights need
    none: they are answered before this."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            raise RuntimeError(f"This server does not speak {scope['type']}.")
        elif not self._keys or self._is_known(_header(scope, b"authorization") or b""):
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                401,
                "The API key is missing or wrong: send the header Authorization: Bearer KEY.",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)

    def _is_known(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        # Every key is compared, each in constant time, so the answer's time tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimit:
    """Takes a body in and refuses one that is too large, or holds too much, before anything parses it.

    max_bytes: of one body, by its announced length, then as it comes. max_total_bytes: of all bodies of
    requests that are not over. bounds: of what a body holds.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, bounds: JsonBounds) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._bounds = bounds
        self._num_total_bytes = self._num_requests = 0
        self._is_trim_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pieces: list[bytes] = []
        num_bytes, has_more = 0, False
        self._num_requests += 1
        try:
            self._check_head(scope)
            has_more = True
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    scope["minivllm.client_left"] = True
                    return
                piece = message.get("body", b"")
                pieces.append(piece)
                num_bytes += len(piece)
                self._num_total_bytes += len(piece)
                has_more = message.get("more_body", False)
                self._check_size(num_bytes)
            pieces[:] = [b"".join(pieces)]
            if num_bytes > LARGE_BODY_BYTES:
                await asyncio.to_thread(self._check_content, pieces[0])
            elif num_bytes:
                self._check_content(pieces[0])
            body_bytes.set(num_bytes)
            await self._app(scope, _received(pieces, receive), send)
        except ApiError as error:
            pieces.clear()
            if has_more:
                await _discard(receive, self._max_bytes - num_bytes)
            await error_response(error)(scope, receive, send)
        finally:
            self._num_total_bytes -= num_bytes
            self._num_requests -= 1
            if num_bytes > LARGE_BODY_BYTES or (num_bytes and not self._num_requests):
                self._trim_soon()

    def _trim_soon(self) -> None:
        """Texts, tokens and answers of many megabytes are gone,
        but the C library would keep the room for them."""
        if self._is_trim_due:
            return
        self._is_trim_due = True
        loop = asyncio.get_running_loop()

        def trim() -> None:
            self._is_trim_due = False
            loop.run_in_executor(None, return_freed_memory)

        loop.call_later(TRIM_SECONDS, trim)

    def _check_content(self, body: bytes) -> None:
        check_utf8(body)
        self._bounds.check(body)

    def _check_head(self, scope: Scope) -> None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            # Servers disagree on where such a request ends,
            # and what one takes for a body is a request to another.
            message = "The request has both Content-Length and Transfer-Encoding: send one of them."
            if b"content-length" not in names:
                message = (
                    "The request has Transfer-Encoding, which HTTP/1.0 does not know: send Content-Length."
                )
            raise ApiError(400, message, code="ambiguous_length", headers={"connection": "close"})
        encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        if any(value.strip().lower() != b"identity" for value in encodings):
            # What unpacks a body would have to bound it a second time,
            # and the clients of this protocol pack none.
            message = (
                "The body is compressed (Content-Encoding), which this server does not read: send it as it "
                "is."
            )
            headers = {"accept-encoding": "identity", "connection": "close"}
            raise ApiError(415, message, code="unsupported_content_encoding", headers=headers)
        announced = _header(scope, b"content-length") or b"0"
        if not announced.isdigit() or len(announced) > 18 or int(announced) > self._max_bytes:
            raise self._too_large()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise self._too_large()
        if self._num_total_bytes > self._max_total_bytes:
            raise ApiError(
                429,
                f"The requests being served have bodies of more than {self._max_total_bytes} bytes in all. "
                "Try again "
                "in 1 s.",
                type="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "1", "connection": "close"},
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than the {self._max_bytes} bytes this server accepts.",
            code="body_too_large",
            headers={"connection": "close"},
        )


async def _discard(receive: Receive, most: int) -> None:
    """Read so many bytes of a body and keep none. A client that is still sending would meet a closed
    connection before it reads the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _received(pieces: list[bytes], receive: Receive) -> Receive:
    """``receive`` of a request whose body is there already:
    the body, which is then let go, and what comes after it."""

    async def receive_again() -> Message:
        return (
            {"type": "http.request", "body": pieces.pop(), "more_body": False} if pieces else await receive()
        )

    return receive_again


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The header's value; None if it is missing or given more than once."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None
