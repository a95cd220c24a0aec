"""The proxy's paths, with the checks around them that every server here has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from minivllm.server.answers.streaming import ClientLeft
from minivllm.server.bodies.errors import install_error_handlers
from minivllm.server.bodies.json_bounds import JsonBounds
from minivllm.server.limits.hosts import KnownHosts
from minivllm.server.limits.middleware import AccessLog, BodyLimit, RequireKey
from minivllm.server.proxy.prompts import PROMPT_FIELDS
from minivllm.server.proxy.relay import Relay, unreachable
from minivllm.server.service.settings import with_images

FORWARDED = {
    "GET": ("/v1/models", "/v1/models/{name:path}", "/version"),
    "POST": ("/v1/embeddings", "/v1/score", "/tokenize", "/detokenize", "/v1/responses/input_tokens"),
}
"""Paths that a decode server answers alone."""
MAX_TOTAL_BODY_BYTES = 64 * 2**20
BOUNDS = JsonBounds(max_values=2**21)
"""Wider than those of the proxy's servers, which know how long a prompt may be."""


def build_proxy_app(
    relay: Relay, api_keys: Sequence[str], max_body_bytes: int, known_hosts: Collection[str] | None = None
) -> ASGIApp:
    """The ASGI application, key check and limits around it included. known_hosts: see KnownHosts."""
    app = FastAPI(title="minivllm proxy", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)

    async def on_client_left(request: Request, _: Exception) -> Response:
        request.scope["minivllm.client_left"] = True
        return Response(status_code=499)

    app.add_exception_handler(ClientLeft, on_client_left)
    for path in PROMPT_FIELDS:
        app.add_api_route(path, relay.generate, methods=["POST"], response_model=None)
    for method, paths in FORWARDED.items():
        for path in paths:
            app.add_api_route(path, relay.forward, methods=[method], response_model=None)

    async def health() -> Response:
        """200 while a decode server is healthy: it can answer alone."""
        return await _health(relay, "/health")

    async def ready() -> Response:
        """200 while a decode server takes in requests."""
        return await _health(relay, "/ready")

    async def metrics() -> Response:
        return Response(relay.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, function in (("/health", health), ("/ready", ready), ("/metrics", metrics)):
        app.add_api_route(path, function, methods=["GET"], response_model=None)
    most = with_images(max_body_bytes)  # servers whose model reads text only refuse larger ones themselves
    wrapped: ASGIApp = BodyLimit(app, most, max(MAX_TOTAL_BODY_BYTES, 2 * most), BOUNDS)
    return AccessLog(KnownHosts(RequireKey(wrapped, api_keys), known_hosts), relay.metrics)


async def _health(relay: Relay, path: str) -> Response:
    """With the numbers of servers that are as they should be."""
    prefill, decode = [await relay.are_ready(pool, path) for pool in (relay.prefill, relay.decode)]
    if not any(decode):
        raise unreachable()
    status = {"status": "ok", "prefill": sum(prefill), "decode": sum(decode)}
    return Response(msgspec.json.encode(status), media_type="application/json")
