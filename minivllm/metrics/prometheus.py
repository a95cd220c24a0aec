"""Prometheus metrics of a server, and its status line.
Every label is one of a fixed set, never a client's text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from minivllm.messages import KVTransferStats, SchedulerStats
from minivllm.processing.outputs import CompletionOutput, RequestOutput

TOKEN_LATENCIES = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
)
REQUEST_LATENCIES = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)
TOKEN_COUNTS = tuple(2.0**power for power in range(18))
MAX_DRAFT_POSITIONS = 32
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """One registry per server. ``engines`` have the cores' own counters, as of the last look."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engines = [EngineSample()]
        self.num_admitted = 0
        self.registry.register(_EngineCollector(self))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.finished = self._counter("request_success", "Completions by how they ended.", "finished_reason")
        self.errors = self._counter("request_errors", "HTTP requests that failed, by class.", "error_class")
        for reason in FINISH_REASONS:
            self.finished.labels(reason)
        self.ttft = self._seconds("time_to_first_token", "Arrival until the first token.", REQUEST_LATENCIES)
        self.itl = self._seconds(
            "inter_token_latency", "Between two tokens of one completion.", TOKEN_LATENCIES
        )
        self.tpot = self._seconds(
            "time_per_output_token", "Mean of a request, without the first.", TOKEN_LATENCIES
        )
        self.e2e = self._seconds("e2e_request_latency", "Arrival until the end.", REQUEST_LATENCIES)
        self.queue = self._seconds("request_queue_time", "Arrival until first scheduled.", REQUEST_LATENCIES)
        self.prefill = self._seconds(
            "request_prefill_time", "First scheduled until first token.", REQUEST_LATENCIES
        )
        self.decode = self._seconds("request_decode_time", "First token until the last.", REQUEST_LATENCIES)
        self.prompt_length = Histogram(
            "minivllm_request_prompt_tokens",
            "Tokens per prompt.",
            buckets=TOKEN_COUNTS,
            registry=self.registry,
        )
        self.generation_length = Histogram(
            "minivllm_request_generation_tokens",
            "Tokens generated per request.",
            buckets=TOKEN_COUNTS,
            registry=self.registry,
        )

    def look_at_engines(self, stats: Sequence[SchedulerStats | None], num_restarts: Sequence[int]) -> None:
        """Take in the counters of the engines;
        None for an engine that did not answer, whose last counters stay."""
        before = dict(enumerate(self.engines))
        self.engines = [
            replace(before.get(index, EngineSample()), is_up=False, num_restarts=restarts)
            if one is None
            else EngineSample(one, num_restarts=restarts)
            for index, (one, restarts) in enumerate(zip(stats, num_restarts))
        ]

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"minivllm_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"minivllm_{name}_seconds", f"{text} [seconds]", buckets=buckets, registry=self.registry
        )


@dataclass(frozen=True)
class EngineSample:
    """One engine at the last look. is_up: it answered then. num_restarts: how often it was started again
    after a death. answered_at: when it answered last, monotonic time [seconds]."""

    stats: SchedulerStats = field(default_factory=SchedulerStats)
    is_up: bool = True
    num_restarts: int = 0
    answered_at: float = field(default_factory=time.monotonic)


class RequestRecorder:
    """Follows the outputs of one request. num_completions: how many the client gets.
    arrival_time: time.monotonic()."""

    def __init__(self, metrics: ServerMetrics, num_completions: int, arrival_time: float) -> None:
        self._metrics = metrics
        self._num_completions = num_completions
        self._arrival_time = arrival_time
        self._has_ended = False
        self._last_times: dict[int, float] = {}
        self._ended: set[int] = set()
        self._num_counted = 0
        self._has_begun = False

    def record(self, output: RequestOutput) -> None:
        metrics, timings = self._metrics, output.metrics
        if not self._has_begun and (timings.num_generation_tokens > 0 or output.embedding is not None):
            self._has_begun = True
            metrics.prompt_tokens.inc(timings.num_prompt_tokens)
            metrics.prompt_length.observe(timings.num_prompt_tokens)
            _observe(metrics.ttft, timings.ttft)
            _observe(metrics.queue, timings.queue_time)
            _observe(metrics.prefill, timings.prefill_time)
        metrics.generation_tokens.inc(timings.num_generation_tokens - self._num_counted)
        self._num_counted = timings.num_generation_tokens
        for completion in output.outputs:
            if timings.last_token_time is not None and not (output.finished and not self._last_times):
                self._record_gap(completion, timings.last_token_time)
            if completion.finish_reason in FINISH_REASONS and completion.index not in self._ended:
                self._ended.add(completion.index)
                metrics.finished.labels(completion.finish_reason).inc()
        if output.finished:
            self._has_ended = True
            if output.embedding is None:
                metrics.generation_length.observe(timings.num_generation_tokens)
            _observe(metrics.decode, timings.decode_time)
            _observe(metrics.e2e, timings.e2e_latency)
            _observe(metrics.tpot, timings.tpot)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request without a last output too:
        its client left, it failed, or its answer was over early."""
        reason = "abort"
        try:
            yield
            reason = "stop"
        except Exception:
            reason = "error"
            raise
        finally:
            if not self._has_ended:
                self._metrics.finished.labels(reason).inc(self._num_completions - len(self._ended))
                self._metrics.generation_length.observe(self._num_counted)
                _observe(self._metrics.e2e, time.monotonic() - self._arrival_time)

    def _record_gap(self, completion: CompletionOutput, now: float) -> None:
        """Several tokens in one output share the time since the last one evenly."""
        num_tokens = len(completion.token_ids)
        last = self._last_times.get(completion.index)
        if num_tokens == 0:
            return
        self._last_times[completion.index] = now
        if last is not None:
            for _ in range(num_tokens):
                self._metrics.itl.observe((now - last) / num_tokens)


def _is_up(engine: EngineSample) -> float:
    return float(engine.is_up)


def _age(engine: EngineSample) -> float:
    return 0.0 if engine.is_up else time.monotonic() - engine.answered_at


GAUGES: tuple[tuple[str, str, Callable[[EngineSample], float]], ...] = (
    ("num_requests_running", "Sequences in the current batch.", lambda one: one.stats.num_running),
    (
        "num_requests_waiting",
        "Sequences that wait for a place in the batch.",
        lambda one: one.stats.num_waiting,
    ),
    ("kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1.", lambda one: one.stats.kv_cache_usage),
    (
        "engine_up",
        "1 if the engine core answered in time, 0 if it is down, hangs or is in a long step.",
        _is_up,
    ),
    (
        "engine_stats_age_seconds",
        "How old the engine's figures are, which it gave when it answered last.",
        _age,
    ),
)
COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queried_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    (
        "prefix_cache_copied",
        "Prompt tokens found in the prefix cache inside a block, which was copied.",
        "prefix_cache_copied_tokens",
    ),
    ("num_preemptions", "Requests that lost their blocks and began again.", "num_preemptions"),
    ("engine_steps", "Steps of the engine core.", "num_steps"),
    ("computed_tokens", "Tokens the model computed, prompts and drafts included.", "num_computed_tokens"),
    (
        "attention_expected_seconds",
        "What attention should have taken, by costs measured when the engine started.",
        "expected_attention_seconds",
    ),
    ("attention_seconds", "What it took, in the same steps.", "measured_attention_seconds"),
    ("spec_decode_num_drafts", "Verifications of at least one drafted token.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", "num_accepted_tokens"),
)
POOL_GAUGES = (
    ("kv_cache_pool_usage_ratio", "Share of KV blocks in use in the pool of a KV group.", "usage"),
    ("kv_cache_pool_blocks", "KV blocks in the pool of a KV group.", "num_blocks"),
)
TRANSFER_COUNTERS: tuple[tuple[str, str, Callable[[KVTransferStats], float]], ...] = (
    ("hit_tokens", "Tokens found in the tier that the KV cache did not have.", lambda one: one.hit_tokens),
    ("loaded_blocks", "KV blocks that came from the tier.", lambda one: one.num_loaded_blocks),
    ("loaded_bytes", "Bytes that came from the tier.", lambda one: one.num_loaded_blocks * one.block_bytes),
    ("saved_blocks", "KV blocks that were given to the tier.", lambda one: one.num_saved_blocks),
    ("saved_bytes", "Bytes that were given to the tier.", lambda one: one.num_saved_blocks * one.block_bytes),
    (
        "failed_blocks",
        "KV blocks that the tier promised, but did not have whole.",
        lambda one: one.num_failed_blocks,
    ),
)


class _EngineCollector:
    """The cores' state and counters, which the cores count themselves. Label engine: its number, from 0."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        engines = [(str(index), one) for index, one in enumerate(self._metrics.engines)]
        text = "Completions the server has taken in."
        yield GaugeMetricFamily("minivllm_num_completions_admitted", text, value=self._metrics.num_admitted)
        for name, text, value in GAUGES:
            yield _family(GaugeMetricFamily, name, text, (([engine], value(one)) for engine, one in engines))
        restarts = (([engine], one.num_restarts) for engine, one in engines)
        yield _family(CounterMetricFamily, "engine_restarts", "Starts of an engine after a death.", restarts)
        for name, text, attribute in COUNTERS:
            counts = (([engine], getattr(one.stats, attribute)) for engine, one in engines)
            yield _family(CounterMetricFamily, name, text, counts)
        for name, text, attribute in POOL_GAUGES:
            of_pools = (
                ([engine, pool.name], getattr(pool, attribute))
                for engine, one in engines
                for pool in one.stats.kv_cache_pools
            )
            yield _family(GaugeMetricFamily, name, text, of_pools, "group")
        of_workers = (
            ([engine, str(rank)], size)
            for engine, one in engines
            for rank, size in enumerate(one.stats.worker_resident_bytes)
        )
        text = "Memory of the process that a worker lives in."
        yield _family(GaugeMetricFamily, "worker_resident_bytes", text, of_workers, "rank")
        if any(one.stats.kv_transfer for _, one in engines):
            yield from _transfers(
                [([engine, tier.tier], tier) for engine, one in engines for tier in one.stats.kv_transfer]
            )
        # Tokens that a client's grammar forces count as drafts too, and those can be many.
        of_positions = (
            ([engine, str(position)], count)
            for engine, one in engines
            for position, count in enumerate(one.stats.num_accepted_tokens_per_position[:MAX_DRAFT_POSITIONS])
        )
        name, text = (
            "accepted_tokens_per_pos",
            "Verifications that kept the drafted token at this position, from 0.",
        )
        yield _family(CounterMetricFamily, f"spec_decode_num_{name}", text, of_positions, "position")


def _transfers(tiers: Sequence[tuple[list[str], KVTransferStats]]) -> Iterable[Metric]:
    """Counters of connectors, by engine and tier. The operator chooses the names of the tiers."""
    for name, text, count in TRANSFER_COUNTERS:
        of_tiers = ((place, count(tier)) for place, tier in tiers)
        yield _family(CounterMetricFamily, f"kv_transfer_{name}", text, of_tiers, "tier")
    waits = HistogramMetricFamily(
        "minivllm_kv_transfer_load_seconds",
        "How long requests waited for loads from the tier.",
        labels=["engine", "tier"],
    )
    for place, tier in tiers:
        buckets = [*((str(bound), count) for bound, count in tier.loads_within), ("+Inf", tier.num_loads)]
        waits.add_metric(place, buckets, tier.load_seconds)
    yield waits


def _family(
    kind: Callable[..., Any], name: str, text: str, values: Iterable[tuple[list[str], float]], *labels: str
) -> Metric:
    """A family of metrics with the label ``engine`` and others."""
    family: Any = kind(f"minivllm_{name}", text, labels=["engine", *labels])
    for place, value in values:
        family.add_metric(place, value)
    made: Metric = family
    return made


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(max(0.0, seconds))


class StatusLine:
    """The console's status line: what happened since the last one."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def next(self, metrics: ServerMetrics, seconds: float) -> str | None:
        """The line for the last ``seconds``; None if nothing happened in them."""
        engines = [one.stats for one in metrics.engines]
        num_running, num_waiting = (
            sum(one.num_running for one in engines),
            sum(one.num_waiting for one in engines),
        )
        now = (
            metrics.registry.get_sample_value("minivllm_prompt_tokens_total") or 0.0,
            metrics.registry.get_sample_value("minivllm_generation_tokens_total") or 0.0,
            float(sum(one.prefix_cache_queried_tokens for one in engines)),
            float(sum(one.prefix_cache_hit_tokens for one in engines)),
            float(sum(one.num_preemptions for one in engines)),
        )
        prompt, generated, queried, hit, preempted = (new - old for new, old in zip(now, self._last))
        self._last = now
        if not (prompt or generated or num_running or num_waiting):
            return None
        num_up = sum(one.is_up for one in metrics.engines)
        parts = [
            *([f"engines {num_up} of {len(engines)}"] if num_up < len(engines) else ()),
            f"running {num_running}",
            f"waiting {num_waiting}",
            f"KV {sum(one.kv_cache_usage for one in engines) / len(engines):.0%}",
            f"prompt {prompt / seconds:,.0f} tok/s",
            f"generation {generated / seconds:,.0f} tok/s",
            f"prefix hits {hit / queried:.0%}" if queried else "prefix hits –",
        ]
        if preempted:
            parts.append(f"preempted {preempted:.0f}")
        return " · ".join(parts)
