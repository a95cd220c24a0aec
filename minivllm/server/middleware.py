"""What happens to every HTTP request before and after its endpoint: id, access log, size limit, key."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.metrics.prometheus import ServerMetrics
from minivllm.server.errors import ApiError, error_response

access_logger = logging.getLogger("minivllm.server.access")

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Answered without a key; "/" is a page without data. Everything else needs one, paths that do not exist too."""
_ECHOED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class AccessLog:
    """Gives every request an id, echoes the client's own, and logs method, path, status and time; never a body."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
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
                "method": scope["method"] if scope["method"].isalpha() else "?",
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 4),
                "request_id": request_id.decode(),
            }
            access_logger.info("%s %r %d in %.3f s (%s)", *fields.values(), extra={"fields": fields})


class RequireKey:
    """Refuses whatever carries none of the keys, by the path the server itself routes on. Preflights need none: they
    are answered before this."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in self._open_paths:
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
    """Refuses bodies that are too large before anything parses them: by their announced length, then as they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length") or b"0"
        if not announced.isdigit() or len(announced) > 18 or int(announced) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                error = self._error()
                # The framework takes any other exception here for broken JSON.
                raise HTTPException(error.status, str(error), error.headers)
            return message

        await self._app(scope, receive_limited, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than the {self._max_bytes} bytes this server accepts.",
            code="body_too_large",
            headers={"connection": "close"},
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The header's value; None if it is missing or given more than once."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None
