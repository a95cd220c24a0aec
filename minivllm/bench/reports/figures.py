"""From the records of a run to figures and their statistics:
latencies, rates, medians, an interval for a ratio."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from minivllm.bench.sides.drive import Answer, Record, Task

P90_MIN_SAMPLES, P99_MIN_SAMPLES = 10, 100
"""Below these counts a percentile would be one of the few largest values by another name."""

Better = Literal["higher", "lower", "neither"]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Figures of a sample for a table; None where there are too few values."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the samples lie, linear between neighbours.
    Raises ValueError for none."""
    if not samples:
        raise ValueError("There is no percentile of nothing.")
    import numpy as np

    return float(np.quantile(samples, share))


def median(samples: Sequence[float]) -> float:
    """The middle value. Raises ValueError for none."""
    return percentile(samples, 0.5)


def summarize(samples: Sequence[float]) -> Summary:
    """p50 of any sample, p90 of at least 10 values, p99 of at least 100."""
    return Summary(
        len(samples),
        median(samples) if samples else None,
        percentile(samples, 0.9) if len(samples) >= P90_MIN_SAMPLES else None,
        percentile(samples, 0.99) if len(samples) >= P99_MIN_SAMPLES else None,
    )


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of the medians, and its 95 % percentile bootstrap interval (Efron 1979): (ratio, low, high).

    Both samples are drawn again, with replacement and independently, 2000 times.
    Raises ValueError for an empty one.
    """
    import numpy as np

    source = np.random.default_rng(seed)

    def medians(samples: Sequence[float]) -> np.ndarray:
        values = np.asarray(samples, dtype=np.float64)
        # In parts, so that thousands of samples do not need gigabytes.
        part = max(1, 2**22 // len(values))
        drawn = [
            np.median(
                values[source.integers(len(values), size=(min(part, RESAMPLES - done), len(values)))], axis=1
            )
            for done in range(0, RESAMPLES, part)
        ]
        return np.concatenate(drawn)

    ratio = _ratio(median(numerator), median(denominator))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = medians(numerator) / medians(denominator)
    ratios = ratios[~np.isnan(ratios)]
    if not len(ratios):
        return ratio, ratio, ratio
    tail = (1.0 - CONFIDENCE) / 2
    # "lower" and "higher" take values that were drawn: between an infinite and a finite one lies nothing.
    low = float(np.quantile(ratios, tail, method="lower"))
    return ratio, low, float(np.quantile(ratios, 1 - tail, method="higher"))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return math.inf if numerator else 1.0


def knee(loads: Sequence[float], gains: Sequence[float]) -> int:
    """Index of the knee of a curve that rises and flattens:
    the point farthest above the line between its ends.

    loads ascend. (Satopää et al. 2011, "Finding a Kneedle in a Haystack", on unsmoothed points.) The last
    point of a curve that never flattens. Raises ValueError for fewer than two points or loads that do not
    ascend.
    """
    if len(loads) != len(gains) or len(loads) < 2 or any(a >= b for a, b in pairwise(loads)):
        raise ValueError("A knee needs at least two points with ascending loads.")
    width, height = loads[-1] - loads[0], max(gains) - gains[0]
    if height <= 0:
        return 0
    above = [(gain - gains[0]) / height - (load - loads[0]) / width for load, gain in zip(loads, gains)]
    best = max(range(len(above)), key=above.__getitem__)
    # Rounding must not make a straight line have a knee.
    return best if above[best] > 1e-9 else len(loads) - 1


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
    """Tokens per second while all requests decode: from the moment the last of them has its first token to
    the one when the first of them ends. Nothing for requests of which some end before others begin.
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


def rate_figures(requests: int, prompt: int, output: int, seconds: float) -> list[Figure]:
    """Requests and tokens per second. Failed requests count for nothing."""
    return [
        Figure("requests", "req/s", "higher", [requests / seconds]),
        Figure("output", "tok/s", "higher", [output / seconds]),
        Figure("prompt and output", "tok/s", "higher", [(prompt + output) / seconds]),
    ]


def throughput_figures(tasks: Sequence[Task], answer: Answer) -> list[Figure]:
    """From the first arrival to the last token."""
    good = [(task, record) for task, record in zip(tasks, answer.records) if record.error is None]
    prompt, output = (
        sum(len(task.prompt) for task, _ in good),
        sum(len(record.token_ids) for _, record in good),
    )
    return rate_figures(len(good), prompt, output, answer.seconds)


def resource_figures(answers: Sequence[Answer]) -> list[Figure]:
    """Peak memory of the engine's processes and what it is made of, what the engine counted,
    and errors by class."""
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
    """Peak memory; from an engine that tells, its weights, the part of its KV cache that takes up memory, and
    the rest: Python and PyTorch themselves, compiled code, activations, and what loading needed for a
    while."""
    peak = answer.peak_bytes
    parts = {"peak memory": float(peak)}
    if "weight_bytes" in answer.counters:
        weights, touched = answer.counters["weight_bytes"], answer.counters["kv_touched_bytes"]
        parts |= {
            "of it weights": weights,
            "of it KV cache": touched,
            "of it the rest": peak - weights - touched,
        }
    return [Figure(name, "bytes", "neither", [value]) for name, value in parts.items()]


def error_figures(records: Sequence[Record]) -> list[Figure]:
    """How many requests failed, and how many of each class."""
    errors = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    figures = [Figure("errors", "count", "lower", [float(sum(errors.values()))])]
    figures += [Figure(f"errors: {name}", "count", "lower", [float(count)]) for name, count in errors.items()]
    return figures
