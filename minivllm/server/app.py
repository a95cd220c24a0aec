"""The application: every endpoint, in front of one engine."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from minivllm import __version__
from minivllm.errors import EngineDeadError
from minivllm.server.answers.streaming import ClientLeft, error_frames, event_stream, while_connected
from minivllm.server.endpoints.chat_endpoint import ChatRun
from minivllm.server.endpoints.completions_endpoint import CompletionRun
from minivllm.server.endpoints.embeddings_endpoint import embed, score
from minivllm.server.endpoints.models_endpoint import load_adapter, model_card, model_list, unload_adapter
from minivllm.server.endpoints.page import add_page
from minivllm.server.endpoints.responses_endpoint import ResponseRun
from minivllm.server.endpoints.tokenization import detokenize, tokenize
from minivllm.server.limits.middleware import OPEN_PATHS, AccessLog, BodyLimit, RequireKey
from minivllm.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from minivllm.server.protocol.completions import Completion, CompletionRequest
from minivllm.server.protocol.embeddings import EmbeddingList, EmbeddingRequest, ScoreList, ScoreRequest
from minivllm.server.protocol.models import DeletedModel, LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest
from minivllm.server.protocol.responses import ResponseObject, ResponseRequest
from minivllm.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from minivllm.server.service.service import Service
from minivllm.server.wire.errors import ErrorBody, engine_dead, error_response, install_error_handlers, shutting_down
from minivllm.server.wire.json_bounds import JsonBounds

Responses = dict[int | str, dict[str, Any]]

MAX_TOTAL_BODY_BYTES = 64 * 2**20
"""Bodies of all requests that are not over; more get 429."""


def _errors(*statuses: int) -> Responses:
    """The failures an endpoint documents, besides those every path has."""
    texts = {
        400: "The body cannot be served; the error names the field.",
        401: "The API key is missing or wrong.",
        403: "The operator does not allow it.",
        404: "There is no such model.",
        409: "The name is taken, or the adapter is in use.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to come back.",
        500: "The server failed.",
        503: "The engine is dead, or the server is shutting down.",
        504: "The request took longer than the server allows.",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in statuses}


GENERATING = _errors(400, 401, 404, 413, 429, 500, 503, 504)
READING = _errors(400, 401, 404, 413)


def _streamable(model: Any) -> Responses:
    """200 is JSON, or with ``stream: true`` a stream of events."""
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    content = {"text/event-stream": {"schema": {**event, "required": ["data"]}}}
    return {200: {"model": model, "content": content, "description": "The answer, or a stream of its pieces."}}


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def build_app(service: Service) -> ASGIApp:
    """The ASGI application, key check and limits around it included."""
    app = FastAPI(
        title="minivllm",
        version=__version__,
        description="An OpenAI-compatible server. Unknown parameters are refused, none is ignored.",
        docs_url=None,
        redoc_url=None,  # these pages would load scripts from elsewhere; the schema is at /openapi.json
    )
    install_error_handlers(app)
    _add_generation(app, service)
    _add_pooling(app, service)
    _add_tokenization(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    add_page(app, service)
    _declare_keys(app)

    async def on_client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientLeft, on_client_left)
    settings = service.settings
    bounds = JsonBounds(max_values=max(JsonBounds.max_values, 2 * service.max_model_len))
    wrapped: ASGIApp = BodyLimit(
        app, settings.max_body_bytes, max(MAX_TOTAL_BODY_BYTES, 2 * settings.max_body_bytes), bounds
    )
    wrapped = RequireKey(wrapped, settings.api_keys)
    if settings.cors_origins:
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return AccessLog(service.tracing.around(wrapped), service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses={**_streamable(ChatCompletion), **GENERATING}, tags=["generation"])
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        run = ChatRun(service, body)
        if body.stream:
            return await event_stream(request, run.stream(), error_frames)
        return json_response(await while_connected(request.receive, run.complete()))

    @app.post("/v1/completions", responses={**_streamable(Completion), **GENERATING}, tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        run = CompletionRun(service, body)
        if body.stream:
            return await event_stream(request, run.stream(), error_frames)
        return json_response(await while_connected(request.receive, run.complete()))

    @app.post("/v1/responses", responses={**_streamable(ResponseObject), **GENERATING}, tags=["generation"])
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Continue a conversation, told as items; nothing is stored."""
        run = ResponseRun(service, body)
        if body.stream:
            return await event_stream(request, run.stream(), run.error_frames)
        return json_response(await while_connected(request.receive, run.complete()))


def _add_pooling(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", responses={200: {"model": EmbeddingList}, **GENERATING}, tags=["embeddings"])
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors."""
        return json_response(await while_connected(request.receive, embed(service, body)))

    @app.post("/v1/score", responses={200: {"model": ScoreList}, **GENERATING}, tags=["embeddings"])
    async def scores(body: ScoreRequest, request: Request) -> Response:
        """How alike texts are: the cosines of their vectors."""
        return json_response(await while_connected(request.receive, score(service, body)))


def _add_tokenization(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={200: {"model": TokenizeResponse}, **READING}, tags=["tokens"])
    async def tokenize_endpoint(body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        service.models.find(body.model)
        return json_response(await service.in_text_thread(tokenize, service, body))

    @app.post("/detokenize", responses={200: {"model": DetokenizeResponse}, **READING}, tags=["tokens"])
    async def detokenize_endpoint(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.models.find(body.model)
        return json_response(await service.in_text_thread(detokenize, service, body))


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses={200: {"model": ModelList}, **_errors(401)}, tags=["models"])
    async def models() -> Response:
        """The names this server answers to."""
        return json_response(model_list(service))

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **_errors(401, 404)}, tags=["models"])
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(model_card(service, service.models.find(name)))

    changing = _errors(400, 401, 403, 409, 413, 503)

    @app.post("/v1/load_lora_adapter", responses={200: {"model": ModelCard}, **changing}, tags=["models"])
    async def load(body: LoadAdapterRequest) -> Response:
        """Serve an adapter from the server's directory for adapters under a name of its own."""
        return json_response(await load_adapter(service, body))

    @app.post(
        "/v1/unload_lora_adapter", responses={200: {"model": DeletedModel}, **changing, **_errors(404)}, tags=["models"]
    )
    async def unload(body: UnloadAdapterRequest) -> Response:
        """Forget an adapter that no request uses."""
        return json_response(await unload_adapter(service, body))


def _add_operation(app: FastAPI, service: Service) -> None:
    async def is_alive() -> bool:
        try:
            await service.engine.check_health()
        except EngineDeadError:
            return False
        return not service.engine.is_dead

    @app.get("/health", responses={200: {"model": Health}, **_errors(503)}, tags=["operation"])
    async def health() -> Response:
        """200 while the engine core's loop answers."""
        return json_response(Health(status="ok")) if await is_alive() else error_response(engine_dead())

    @app.get("/ready", responses={200: {"model": Health}, **_errors(503)}, tags=["operation"])
    async def ready() -> Response:
        """200 while new requests are taken in: healthy, and not shutting down."""
        if service.admission.is_draining:
            return error_response(shutting_down())
        return json_response(Health(status="ok")) if await is_alive() else error_response(engine_dead())

    @app.get("/version", responses={200: {"model": Version}, **_errors(401)}, tags=["operation"])
    async def version() -> Response:
        """The server's version."""
        return json_response(Version(version=__version__))

    @app.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(401)},
        tags=["operation"],
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        await service.refresh_stats()
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _declare_keys(app: FastAPI) -> None:
    """The schema says that every path takes a bearer key, except the open ones; the check itself stands before it."""
    make = app.openapi

    def with_keys() -> dict[str, Any]:
        schema = make()
        schemes = {"key": {"type": "http", "scheme": "bearer"}}
        schema.setdefault("components", {})["securitySchemes"] = schemes
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
        return schema

    app.openapi = with_keys  # type: ignore[method-assign]
