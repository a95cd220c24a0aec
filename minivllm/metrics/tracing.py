"""OpenTelemetry spans, one per request: time in the queue, of the prefill and of the decode, and what it was.

Optional: nothing of this is imported unless an endpoint is named. Attributes have the names of the semantic
conventions for generative AI where there are any.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.errors import ConfigError
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_PATH = "/v1/traces"
PROPAGATED = (b"traceparent", b"tracestate")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
MISSING = "traces need the OpenTelemetry SDK and its OTLP exporter: pip install 'minivllm[otel]'."

Record = Callable[[RequestOutput], None]


class Tracing:
    """Traces of requests; this class records none."""

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with the caller's trace as the parent of what it does."""
        return app

    @contextmanager
    def following(self, request: PreparedRequest, model: str) -> Iterator[Record]:
        """Follow a request while the context lasts;
        an exception that ends it is told of one that is unfinished.

        model: the name of what is served without an adapter.
        """
        yield lambda output: None

    def close(self) -> None:
        """Send what has not been sent yet."""


class OpenTelemetryTracing(Tracing):
    """Spans of one provider, which it owns:
    ``request`` with the children ``queue``, ``prefill`` and ``decode``."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("minivllm")

    def around(self, app: ASGIApp) -> ASGIApp:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {
                name.decode(): value.decode("latin-1")
                for name, value in scope.get("headers", ())
                if name in PROPAGATED
            }
            token = context.attach(propagator.extract(headers))
            try:
                await app(scope, receive, send)
            finally:
                context.detach(token)

        return traced

    @contextmanager
    def following(self, request: PreparedRequest, model: str) -> Iterator[Record]:
        span = self._begin(request, model)
        last: RequestOutput | None = None
        reasons: dict[int, str] = {}
        error: BaseException | None = None

        def record(output: RequestOutput) -> None:
            nonlocal last
            last = output
            reasons.update(
                {one.index: one.finish_reason for one in output.outputs if one.finish_reason is not None}
            )

        try:
            yield record
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end(span, last, [reasons[index] for index in sorted(reasons)], error)

    def close(self) -> None:
        self._provider.shutdown()

    def _begin(self, request: PreparedRequest, model: str) -> Span:
        from opentelemetry.trace import SpanKind

        params, lora = request.params, request.sequences[0].lora
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model if lora is None else lora.name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": request.sequences[0].max_tokens,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        return self._tracer.start_span(
            "request",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_wall_time(request.arrival_time),
        )

    def _end(
        self, span: Span, output: RequestOutput | None, finish_reasons: list[str], error: BaseException | None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        if output is not None:
            self._tell(span, output.metrics)
            span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
        is_done = output is not None and output.finished and output.error is None
        if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            # The client left, or what the model had said was the whole answer.
            span.set_attribute("minivllm.cancelled", not is_done)
        elif error is not None and not is_done:
            # The class alone: what an exception says is for the log and, in a sentence, for the client.
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _tell(self, span: Span, metrics: RequestMetrics) -> None:
        """Tokens, times, and a child span for every phase that has begun and ended."""
        from opentelemetry.trace import set_span_in_context

        span.set_attribute("gen_ai.usage.output_tokens", metrics.num_generation_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", metrics.num_cached_tokens)
        span.set_attribute("minivllm.num_preemptions", metrics.num_preemptions)
        for name, seconds in (
            ("gen_ai.latency.time_in_queue", metrics.queue_time),
            ("gen_ai.latency.time_to_first_token", metrics.ttft),
            ("gen_ai.latency.time_in_model_prefill", metrics.prefill_time),
            ("gen_ai.latency.time_in_model_decode", metrics.decode_time),
        ):
            if seconds is not None:
                span.set_attribute(name, seconds)
        phases = (
            ("queue", metrics.arrival_time, metrics.first_scheduled_time),
            ("prefill", metrics.first_scheduled_time, metrics.first_token_time),
            ("decode", metrics.first_token_time, metrics.last_token_time),
        )
        parent = set_span_in_context(span)
        for name, start, end in phases:
            if start is not None and end is not None:
                self._tracer.start_span(name, context=parent, start_time=_wall_time(start)).end(
                    _wall_time(end)
                )


def check_packages(endpoint: str | None) -> None:
    """Raises ConfigError if traces are to go to ``endpoint`` and a package is missing that they need."""
    if endpoint is not None and not all(map(_is_installed, PACKAGES)):
        raise ConfigError(f"--otlp-endpoint is {endpoint!r}, but {MISSING}")


def make_tracing(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Tracing:
    """Tracing to ``endpoint``, or to where OpenTelemetry's own variables say; none where neither names one.

    endpoint: of an OTLP collector over HTTP, such as http://127.0.0.1:4318. Raises ConfigError if the
    packages are missing that it needs; where only a variable asks for traces, that is a warning.
    """
    is_named = any(environment.get(name) for name in ENDPOINT_VARIABLES)
    if endpoint is None and (not is_named or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return Tracing()
    check_packages(endpoint)
    if not all(map(_is_installed, PACKAGES)):
        logger.warning("The environment names an OTLP endpoint, and nothing is sent there: %s", MISSING)
        return Tracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = None if endpoint is None else _traces_url(endpoint)
    resource = Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME", "minivllm")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return OpenTelemetryTracing(provider)


def _traces_url(endpoint: str) -> str:
    """As OpenTelemetry reads a base URL: the path of traces is appended, unless it is there."""
    return endpoint if endpoint.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package that it would lie in
        return False


def _wall_time(moment: float) -> int:
    """time.monotonic() [seconds] as Unix time [nanoseconds]."""
    return time.time_ns() + round((moment - time.monotonic()) * 1e9)
