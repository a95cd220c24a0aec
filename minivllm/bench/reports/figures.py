"""From the records of a run to figures: latencies per request and per token, rates, errors, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.bench.reports.report import Better
from minivllm.bench.reports.statistics import P99_MIN_SAMPLES, median, percentile
from minivllm.bench.sides.drive import Answer, Record, Task


@dataclass(frozen=True)
class Figure:
    """Samples of one metric from one run."""

    metric: str
    unit: str
    better: Better
    samples: list[float] = field(default_factory=list)


def time_to_first_token(record: Record) -> float:
    """From the moment the request was due, whether or not the engine had time for it [seconds]."""
    return record.times[0] - record.arrival


def time_per_output_token(record: Record) -> float:
    """Of the tokens after the first one [seconds]. For at least two tokens."""
    return (record.times[-1] - record.times[0]) / (len(record.times) - 1)


def inter_token_latencies(record: Record) -> list[float]:
    """Gap before every token after the first arrival [seconds].

    Tokens that come together share the gap before them equally: a chunk is not a token.
    """
    gaps: list[float] = []
    previous, together = None, 0
    for moment, following in zip(record.times, [*record.times[1:], None]):
        together += 1
        if following == moment:
            continue
        if previous is not None:
            gaps += [(moment - previous) / together] * together
        previous, together = moment, 0
    return gaps


def decode_speed(records: Sequence[Record]) -> list[float]:
    """Tokens per second while all requests decode: from the moment the last of them has its first token to the one
    when the first of them ends. Nothing for requests of which some end before others begin.
    """
    begin = max(record.times[0] for record in records)
    end = min(record.times[-1] for record in records)
    tokens = sum(begin < moment <= end for record in records for moment in record.times)
    return [tokens / (end - begin)] if end > begin else []


def latency_figures(records: Sequence[Record]) -> list[Figure]:
    """TTFT, TPOT, ITL and E2E of the requests that succeeded [ms]; ITL spikes against the usual ones."""
    good = [record for record in records if record.error is None and record.times]
    gaps = [1e3 * gap for record in good for gap in inter_token_latencies(record)]
    figures = [
        Figure("TTFT", "ms", "lower", [1e3 * time_to_first_token(record) for record in good]),
        Figure("TPOT", "ms", "lower", [1e3 * time_per_output_token(r) for r in good if len(r.times) > 1]),
        Figure("ITL", "ms", "lower", gaps),
        Figure("E2E", "ms", "lower", [1e3 * (record.times[-1] - record.arrival) for record in good]),
    ]
    if len(gaps) >= P99_MIN_SAMPLES and (middle := median(gaps)) > 0:
        figures.append(Figure("p99 ITL / median ITL", "×", "lower", [percentile(gaps, 0.99) / middle]))
    return figures


def throughput_figures(tasks: Sequence[Task], answer: Answer) -> list[Figure]:
    """Requests and tokens per second from the first arrival to the last token. Failed requests count for nothing."""
    good = [(task, record) for task, record in zip(tasks, answer.records) if record.error is None]
    output = sum(len(record.token_ids) for _, record in good)
    prompt = sum(len(task.prompt) for task, _ in good)
    return [
        Figure("requests", "req/s", "higher", [len(good) / answer.seconds]),
        Figure("output", "tok/s", "higher", [output / answer.seconds]),
        Figure("prompt and output", "tok/s", "higher", [(prompt + output) / answer.seconds]),
    ]


def resource_figures(answers: Sequence[Answer]) -> list[Figure]:
    """Peak memory of the process and what it is made of, what the engine counted, and errors by class."""
    figures = memory_figures(max(answers, key=lambda answer: answer.peak_bytes))
    for name, metric, unit in (
        ("kv_peak", "KV cache peak", "share"),
        ("cache_hit_rate", "prefix cache hits", "share"),
        ("preemptions", "preemptions", "count"),
    ):
        samples = [answer.counters[name] for answer in answers if name in answer.counters]
        if samples:
            figures.append(Figure(metric, unit, "neither", samples))
    return figures + error_figures([record for answer in answers for record in answer.records])


def memory_figures(answer: Answer) -> list[Figure]:
    """Peak memory; from an engine that tells, its weights, the part of its KV cache that takes up memory, and the rest:
    Python and PyTorch themselves, compiled code, activations, and what loading needed for a while."""
    peak = answer.peak_bytes
    parts = {"peak memory": float(peak)}
    if "weight_bytes" in answer.counters:
        weights, touched = answer.counters["weight_bytes"], answer.counters["kv_touched_bytes"]
        parts |= {"of it weights": weights, "of it KV cache": touched, "of it the rest": peak - weights - touched}
    return [Figure(name, "bytes", "neither", [value]) for name, value in parts.items()]


def error_figures(records: Sequence[Record]) -> list[Figure]:
    """How many requests failed, and how many of each class."""
    errors = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    figures = [Figure("errors", "count", "lower", [float(sum(errors.values()))])]
    figures += [Figure(f"errors: {name}", "count", "lower", [float(count)]) for name, count in errors.items()]
    return figures
