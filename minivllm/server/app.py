"""The application: every endpoint, over one engine."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm import __version__
from minivllm.server.answers.streaming import ClientLeft, event_stream, while_connected
from minivllm.server.bodies.errors import documented, install_error_handlers, shutting_down
from minivllm.server.bodies.json_bounds import JsonBounds
from minivllm.server.bodies.other_clients import is_strict
from minivllm.server.endpoints import models_endpoint as small
from minivllm.server.endpoints.chat_endpoint import ChatRun
from minivllm.server.endpoints.completion_run import CompletionRun
from minivllm.server.endpoints.completions_endpoint import TextRun
from minivllm.server.endpoints.embeddings_endpoint import embed, rerank, score
from minivllm.server.endpoints.responses_endpoint import ResponseRun
from minivllm.server.limits.hosts import KnownHosts
from minivllm.server.limits.middleware import OPEN_PATHS, AccessLog, BodyLimit, RequireKey
from minivllm.server.page.page import add_page
from minivllm.server.protocol import chat
from minivllm.server.protocol import completions as texts
from minivllm.server.protocol import operation as ops
from minivllm.server.protocol import responses as items
from minivllm.server.service.service import Service
from minivllm.server.service.settings import with_images

MAX_TOTAL_BODY_BYTES = 64 * 2**20
"""Bodies of all requests that are not over; more get 429."""
GENERATING = documented(400, 401, 404, 413, 415, 429, 500, 503, 504)
READING = documented(400, 401, 404, 413, 415)


def _streamable(model: Any) -> dict[int | str, dict[str, Any]]:
    """200 is JSON, or with ``stream: true`` a stream of events."""
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    content = {"text/event-stream": {"schema": {**event, "required": ["data"]}}}
    return {
        200: {"model": model, "content": content, "description": "The answer, or a stream of its pieces."}
    }


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def generated(request: Request, run: CompletionRun | ResponseRun, stream: bool | None) -> Response:
    """The response of a run, in one piece or as a stream of events."""
    if stream:
        return await event_stream(request, run.stream(), run.error_frames)
    return json_response(await while_connected(request.receive, run.complete()))


def build_app(service: Service) -> ASGIApp:
    """The ASGI application, key check and limits around it included."""
    app = FastAPI(
        title="minivllm",
        version=__version__,
        description="An OpenAI-compatible server. Unknown parameters that could change an answer are "
        "refused.",
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
    inner = _with_head(_strict(app) if settings.strict else app)
    bounds = JsonBounds(max_values=max(JsonBounds.max_values, 2 * service.max_model_len))
    most = settings.max_body_bytes
    if service.sees:
        most = with_images(most)
    wrapped: ASGIApp = BodyLimit(inner, most, max(MAX_TOTAL_BODY_BYTES, 2 * most), bounds)
    wrapped = RequireKey(wrapped, settings.api_keys)
    if settings.cors_origins:
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],  # clients send headers of their own, which change as they do (x-stainless-…)
            expose_headers=["x-request-id", "retry-after"],
        )
    wrapped = KnownHosts(wrapped, settings.known_hosts)
    return AccessLog(service.tracing.around(wrapped), service.metrics)


def _with_head(app: ASGIApp) -> ASGIApp:
    """The application, which answers HEAD as it does GET; the connection leaves the body out."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await app({**scope, "method": "GET"} if is_head else scope, receive, send)

    return answer


def _strict(app: ASGIApp) -> ASGIApp:
    """The application, reading bodies without leniency towards clients of other servers."""

    async def strictly(scope: Scope, receive: Receive, send: Send) -> None:
        is_strict.set(True)
        await app(scope, receive, send)

    return strictly


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        responses={**_streamable(chat.ChatCompletion), **GENERATING},
        tags=["generation"],
    )
    async def chat_completions(body: chat.ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        return await generated(request, ChatRun(service, body), body.stream)

    @app.post(
        "/v1/completions", responses={**_streamable(texts.Completion), **GENERATING}, tags=["generation"]
    )
    async def completions(body: texts.CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await generated(request, TextRun(service, body), body.stream)

    @app.post(
        "/v1/responses", responses={**_streamable(items.ResponseObject), **GENERATING}, tags=["generation"]
    )
    async def responses(body: items.ResponseRequest, request: Request) -> Response:
        """Continue a conversation, told as items; nothing is stored."""
        return await generated(request, ResponseRun(service, body), body.stream)

    counted = {200: {"model": items.InputTokens}, **READING, **documented(429)}

    @app.post("/v1/responses/input_tokens", responses=counted, tags=["tokens"])
    async def input_tokens(body: items.ResponseRequest) -> Response:
        """How many tokens the input of such a response has."""
        return json_response(await ResponseRun(service, body).count())


def _add_pooling(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/embeddings", responses={200: {"model": texts.EmbeddingList}, **GENERATING}, tags=["embeddings"]
    )
    async def embeddings(body: texts.EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors."""
        return json_response(await while_connected(request.receive, embed(service, body)))

    @app.post("/v1/score", responses={200: {"model": texts.ScoreList}, **GENERATING}, tags=["embeddings"])
    async def scores(body: texts.ScoreRequest, request: Request) -> Response:
        """How alike texts are: the cosines of their vectors."""
        return json_response(await while_connected(request.receive, score(service, body)))

    ranked = {200: {"model": texts.RerankResponse}, **GENERATING}

    @app.post("/v1/rerank", responses=ranked, tags=["embeddings"])
    async def reranking(body: texts.RerankRequest, request: Request) -> Response:
        """Documents in the order in which they are like a query, by the cosines of their vectors."""
        return json_response(await while_connected(request.receive, rerank(service, body)))


def _add_tokenization(app: FastAPI, service: Service) -> None:
    answers = {200: {"model": ops.TokenizeResponse}, **READING, **documented(429)}

    @app.post("/tokenize", responses=answers, tags=["tokens"])
    async def tokenize_endpoint(body: ops.TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        service.models.find(body.model)
        return json_response(await service.in_text_thread(small.tokenize, service, body))

    @app.post("/detokenize", responses={200: {"model": ops.DetokenizeResponse}, **READING}, tags=["tokens"])
    async def detokenize_endpoint(body: ops.DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.models.find(body.model)
        return json_response(await service.in_text_thread(small.detokenize, service, body))


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses={200: {"model": ops.ModelList}, **documented(401)}, tags=["models"])
    async def models() -> Response:
        """The names this server answers to."""
        cards = [small.model_card(service, one) for one in service.models.all]
        return json_response(ops.ModelList(object="list", data=cards))

    @app.get(
        "/v1/models/{name:path}",
        responses={200: {"model": ops.ModelCard}, **documented(401, 404)},
        tags=["models"],
    )
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(small.model_card(service, service.models.find(name))) if name else await models()

    changing = documented(400, 401, 403, 409, 413, 415, 503)
    unloading = {200: {"model": ops.DeletedModel}, **changing, **documented(404)}

    @app.post("/v1/load_lora_adapter", responses={200: {"model": ops.ModelCard}, **changing}, tags=["models"])
    async def load(body: ops.LoadAdapterRequest) -> Response:
        """Serve an adapter from the server's directory for adapters under a name of its own."""
        return json_response(
            small.model_card(service, await service.models.load(body.lora_name, body.lora_path))
        )

    @app.post("/v1/unload_lora_adapter", responses=unloading, tags=["models"])
    async def unload(body: ops.UnloadAdapterRequest) -> Response:
        """Forget an adapter that no request uses."""
        await service.models.unload(body.lora_name)
        return json_response(ops.DeletedModel(id=body.lora_name, object="model", deleted=True))


def _add_operation(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={200: {"model": ops.Health}, **documented(503)}, tags=["operation"])
    async def health() -> Response:
        """200 while the engine core's loop answers."""
        await service.engine.check_health()
        return json_response(ops.Health(status="ok"))

    @app.get("/ready", responses={200: {"model": ops.Health}, **documented(503)}, tags=["operation"])
    async def ready() -> Response:
        """200 while new requests are taken in: healthy, and not shutting down."""
        if service.admission.is_draining:
            raise shutting_down()
        return await health()

    @app.get("/version", responses={200: {"model": ops.Version}, **documented(401)}, tags=["operation"])
    async def version() -> Response:
        """The server's version."""
        return json_response(ops.Version(version=__version__))

    @app.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented(401)},
        tags=["operation"],
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        await service.refresh_stats()
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _declare_keys(app: FastAPI) -> None:
    """The schema says that every path takes a bearer key, except the open ones;
    the check itself stands before it."""
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
