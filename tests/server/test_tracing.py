"""A span per request, with its phases as children, in the caller's trace; none where none was asked for.

The judge is OpenTelemetry's own in-memory exporter, and for times the server's metrics of the same request.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minivllm.errors import ConfigError
from minivllm.metrics import tracing
from minivllm.metrics.tracing import OpenTelemetryTracing, Tracing, make_tracing
from minivllm.server.service import service
from minivllm.server.service.settings import ServerSettings
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server and the spans that it has ended."""

    def __init__(self, server: ServedCore, exporter: Any) -> None:
        self.server, self._exporter = server, exporter

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json=body, headers=headers)

    def spans(self, count: int) -> dict[str, list[Any]]:
        """Wait for ``count`` spans; they come back by name."""
        self.server.wait_until(lambda: len(self._exporter.get_finished_spans()) >= count)
        found: dict[str, list[Any]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        self._exporter.clear()
        assert sum(map(len, found.values())) == count
        return found


@pytest.fixture
def traced(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(service, "make_tracing", lambda endpoint: OpenTelemetryTracing(provider))
    with served(ScriptedCore(scripts), scripts.tokenizer) as running:
        yield Traced(running, exporter)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases_and_counts(traced: Traced, stream: bool) -> None:
    body = {"prompt": "say:a b c", "max_tokens": 5, "temperature": 0.5, "stream": stream}
    assert traced.post(body).status_code == 200
    found = traced.spans(4)
    [span] = found["request"]
    num_prompt, num_output = (len(traced.server.core.admitted[-1].prompt_token_ids), 5)
    assert span.attributes["gen_ai.usage.input_tokens"] == num_prompt
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] <= num_output
    assert (
        span.attributes["gen_ai.request.max_tokens"] == 5
        and span.attributes["gen_ai.request.temperature"] == 0.5
    )
    assert span.attributes["gen_ai.request.model"] == "scripted"
    assert span.attributes["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
    assert span.status.is_ok or span.status.status_code.name == "UNSET"
    queue, prefill, decode = (found[name][0] for name in ("queue", "prefill", "decode"))
    assert all(child.parent.span_id == span.context.span_id for child in (queue, prefill, decode))
    slack = 5_000_000  # [ns] between two readings of two clocks
    assert queue.start_time == pytest.approx(span.start_time, abs=slack)
    assert prefill.start_time == pytest.approx(queue.end_time, abs=slack)
    assert decode.start_time == pytest.approx(prefill.end_time, abs=slack)
    assert span.start_time <= decode.end_time <= span.end_time + slack
    total = traced.server.run.service.metrics.registry.get_sample_value(
        "minivllm_time_to_first_token_seconds_sum"
    )
    assert span.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(total)


def test_the_callers_trace_is_the_parent(traced: Traced) -> None:
    traced.post({"prompt": "say:a"}, traceparent=f"00-{TRACE}-{PARENT}-01")
    [span] = traced.spans(4)["request"]
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    traced.post({"prompt": "say:a"})
    [alone] = traced.spans(4)["request"]
    assert alone.parent is None and alone.context.trace_id != span.context.trace_id
    traced.post({"prompt": "say:a"}, traceparent="00-nonsense")
    assert traced.spans(4)["request"][0].parent is None


def test_every_prompt_has_a_span_and_every_completion_its_reason(traced: Traced) -> None:
    body = {"prompt": ["say:a", "say:b c d e"], "n": 2, "max_tokens": 2, "stream": True}
    traced.post(body, traceparent=f"00-{TRACE}-{PARENT}-01")
    spans = traced.spans(8)["request"]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert [len(span.attributes["gen_ai.response.finish_reasons"]) for span in spans] == [2, 2]


def test_what_fails_and_what_is_left_are_told_apart(traced: Traced) -> None:
    assert traced.post({"prompt": "say:REFUSE"}).status_code == 400
    [failed] = traced.spans(2)["request"]  # it was queued, and nothing more
    assert failed.attributes["error.type"] == "RequestError" and not failed.status.is_ok
    assert "blocks" not in str(failed.to_json())
    traced.server.core.held = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{traced.server.url}/v1/completions", json={"prompt": "say:a"}, timeout=0.3)
    [left] = traced.spans(1)["request"]
    assert left.attributes["minivllm.cancelled"] is True and "error.type" not in left.attributes


def test_the_standard_variables_or_the_setting_choose_the_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    variable = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert type(make_tracing(None, {})) is Tracing
    assert type(make_tracing(None, {**variable, "OTEL_SDK_DISABLED": "true"})) is Tracing
    for made in (make_tracing(None, variable), make_tracing("http://127.0.0.1:9", {})):
        assert isinstance(made, OpenTelemetryTracing)
        made.close()
    for given in ("http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"):
        assert tracing._traces_url(given) == "http://a:4318/v1/traces"
    with pytest.raises(ConfigError, match="otlp_endpoint is 'a:4318'"):
        ServerSettings(otlp_endpoint="a:4318")


def test_a_missing_package_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.no_such_package", "no_such_package.at_all"))
    with pytest.raises(ConfigError, match=r"pip install 'minivllm\[otel\]'"):
        make_tracing("http://127.0.0.1:9", {})
    assert type(make_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})) is Tracing
    assert "minivllm[otel]" in caplog.text


def test_nothing_of_it_is_imported_unless_it_is_wanted() -> None:
    # The API alone, which does nothing by itself, may be there for the sake of the web framework.
    program = (
        "import sys, minivllm.server.app, minivllm.metrics.tracing as tracing; tracing.make_tracing(None, "
        "{}); "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in "
        "sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
