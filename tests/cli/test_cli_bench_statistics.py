"""The statistics of benchmarks, judged by numpy and by what must hold;
figures, judged by hand-made records."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.reports.figures import (
    Figure,
    inter_token_latencies,
    knee,
    latency_figures,
    median,
    memory_figures,
    percentile,
    ratio_interval,
    resource_figures,
    summarize,
    throughput_figures,
)
from minivllm.bench.rounds.side_processes import Answer
from minivllm.bench.sides.drive import Record, Task

SAMPLES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


@given(SAMPLES, st.floats(0, 1))
def test_percentiles_are_those_of_numpy(samples: list[float], share: float) -> None:
    assert percentile(samples, share) == pytest.approx(np.quantile(samples, share), rel=1e-9, abs=1e-3)
    assert median(samples) == pytest.approx(np.median(samples), rel=1e-9, abs=1e-3)


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
    assert summarize([]).p50 is None


@pytest.mark.parametrize(
    ("count", "has_p90", "has_p99"),
    [(9, False, False), (10, True, False), (99, True, False), (100, True, True)],
)
def test_a_percentile_needs_enough_samples(count: int, has_p90: bool, has_p99: bool) -> None:
    summary = summarize([float(value) for value in range(count)])
    assert (summary.p90 is not None, summary.p99 is not None) == (has_p90, has_p99)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    source = random.Random(0)
    hits = 0
    for seed in range(60):
        ours = [source.lognormvariate(math.log(2.0), 0.2) for _ in range(25)]
        theirs = [source.lognormvariate(0.0, 0.2) for _ in range(25)]
        ratio, low, high = ratio_interval(ours, theirs, seed)
        assert low <= ratio <= high
        hits += low <= 2.0 <= high
    assert 52 <= hits <= 60, "57 of 60 are expected"


def test_the_interval_is_reproducible_and_narrows_with_more_samples() -> None:
    source = random.Random(1)
    many = [source.gauss(10, 1) for _ in range(400)]
    assert ratio_interval(many, many[::-1]) == ratio_interval(many, many[::-1])
    _, low, high = ratio_interval(many, many)
    _, low_of_few, high_of_few = ratio_interval(many[:10], many[:10])
    assert high - low < (high_of_few - low_of_few) / 2


def test_a_ratio_to_zero_is_infinite_and_two_zeros_are_equal() -> None:
    assert ratio_interval([1.0], [0.0]) == (math.inf, math.inf, math.inf)
    assert ratio_interval([0.0], [0.0]) == (1.0, 1.0, 1.0)


def test_the_knee_is_where_a_curve_flattens() -> None:
    assert knee([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 8.5, 8.6]) == 3
    assert knee([1, 2, 3], [5, 10, 15]) == 2, "a straight line has none, so the end"
    assert knee([1, 2, 3], [5, 4, 3]) == 0, "it only gets worse"
    with pytest.raises(ValueError, match="ascending"):
        knee([2, 1], [1, 2])


def of(figures: list[Figure]) -> dict[str, list[float]]:
    return {figure.metric: figure.samples for figure in figures}


def test_latencies_start_at_the_scheduled_arrival() -> None:
    record = Record(arrival=1.0, token_ids=[7, 8, 9], times=[1.5, 1.6, 1.8])
    figures = of(latency_figures([record]))
    assert figures["TTFT"] == [pytest.approx(500)]
    assert figures["TPOT"] == [pytest.approx(150)]
    assert figures["ITL"] == [pytest.approx(100), pytest.approx(200)]
    assert figures["E2E"] == [pytest.approx(800)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_a_chunk_is_not_a_token(chunks: list[int]) -> None:
    times = [0.5 * (number + 1) for number, size in enumerate(chunks) for _ in range(size)]
    gaps = inter_token_latencies(Record(times=times, token_ids=[0] * len(times)))
    assert len(gaps) == sum(chunks[1:]), "one gap per token after the first arrival"
    assert sum(gaps) == pytest.approx(times[-1] - times[0])
    assert all(gap > 0 for gap in gaps)


def test_failed_requests_count_as_errors_and_nothing_else() -> None:
    good = Record(0.0, [1, 2], [0.5, 1.0])
    bad = Record(0.0, [3], [0.1], error="RequestError: too long")
    answer = Answer(2.0, [good, bad], peak_bytes=10, counters={"kv_peak": 0.5, "preemptions": 3.0})
    rates = of(throughput_figures([Task([1] * 4, 2), Task([1] * 100, 2)], answer))
    assert rates == {"requests": [0.5], "output": [1.0], "prompt and output": [3.0]}
    assert of(latency_figures(answer.records))["TTFT"] == [pytest.approx(500)]
    resources = of(resource_figures([answer, answer]))
    assert resources["errors"] == resources["errors: RequestError"] == [2.0]
    assert resources["KV cache peak"] == [0.5, 0.5] and resources["preemptions"] == [3.0, 3.0]


def test_stutter_is_the_ratio_of_slow_gaps_to_usual_ones_and_needs_a_hundred() -> None:
    steady = [0.01 * step for step in range(101)]
    stuttering = [*steady[:98], *(moment + 0.1 for moment in steady[98:])]
    assert of(latency_figures([Record(times=steady)]))["p99 ITL / median ITL"] == [pytest.approx(1)]
    assert "p99 ITL / median ITL" not in of(latency_figures([Record(times=steady[:50])]))
    [spike] = of(latency_figures([Record(times=[*stuttering, 1.25])]))["p99 ITL / median ITL"]
    assert spike > 5


def test_peak_memory_is_told_apart_where_the_engine_knows_its_parts() -> None:
    ours = Answer(1.0, [], peak_bytes=1000, counters={"weight_bytes": 300.0, "kv_touched_bytes": 200.0})
    theirs = Answer(1.0, [], peak_bytes=1000, counters={})
    assert {figure.metric: figure.samples for figure in memory_figures(ours)} == {
        "peak memory": [1000],
        "of it weights": [300],
        "of it KV cache": [200],
        "of it the rest": [500],
    }
    assert [figure.metric for figure in memory_figures(theirs)] == ["peak memory"]
