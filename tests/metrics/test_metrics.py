"""Counters agree with the events, under labels that clients cannot choose; the dashboard shows them."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minivllm.messages import PoolStats, SchedulerStats
from minivllm.metrics.prometheus import MAX_DRAFT_POSITIONS, RequestRecorder, ServerMetrics, StatusLine
from minivllm.processing.outputs import CompletionOutput, RequestMetrics, RequestOutput


def values_of(metrics: ServerMetrics) -> dict[str, float]:
    """Sample name with its labels -> value, as Prometheus itself reads the exposition."""
    samples = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def record_stream(metrics: ServerMetrics) -> None:
    """A request of 5 prompt tokens with two completions:
    arrival 10, scheduled 11, tokens at 12, 12.5, 13.5."""
    timings = RequestMetrics(arrival_time=10.0, num_prompt_tokens=5, num_sequences=2)
    timings.queued_time, timings.first_scheduled_time = 10.5, 11.0
    recorder = RequestRecorder(metrics, 2, 10.0)

    def step(now: float, outputs: list[CompletionOutput], finished: bool = False) -> None:
        timings.record_tokens(sum(len(output.token_ids) for output in outputs), now)
        timings.finished_time = now if finished else None
        recorder.record(RequestOutput("r", None, [1] * 5, outputs, finished, metrics=timings))

    step(12.0, [CompletionOutput(0, "a", [1]), CompletionOutput(1, "b", [2])])
    step(12.5, [CompletionOutput(0, "c", [3, 4]), CompletionOutput(1, "", [9], finish_reason="stop")])
    step(13.5, [CompletionOutput(0, "d", [5], finish_reason="length")], finished=True)


def test_a_requests_times_and_tokens_are_recorded_once() -> None:
    metrics = ServerMetrics()
    record_stream(metrics)
    values = values_of(metrics)
    assert values["minivllm_prompt_tokens_total"] == 5
    assert values["minivllm_generation_tokens_total"] == 6
    for name, seconds in {
        "time_to_first_token": 2.0,
        "request_queue_time": 1.0,
        "request_prefill_time": 1.0,
        "request_decode_time": 1.5,
        "e2e_request_latency": 3.5,
    }.items():
        assert values[f"minivllm_{name}_seconds_count"] == 1
        assert values[f"minivllm_{name}_seconds_sum"] == pytest.approx(seconds)
    assert values["minivllm_request_success_total{finished_reason=stop}"] == 1
    assert values["minivllm_request_success_total{finished_reason=length}"] == 1


def test_tokens_that_come_together_share_the_time_between_outputs() -> None:
    metrics = ServerMetrics()
    record_stream(metrics)
    values = values_of(metrics)
    # Completion 0: two tokens in half a second, one after another second;
    # completion 1: one token in half a second.
    assert values["minivllm_inter_token_latency_seconds_count"] == 4
    assert values["minivllm_inter_token_latency_seconds_sum"] == pytest.approx(2.0)
    assert values["minivllm_inter_token_latency_seconds_bucket{le=0.3}"] == 2


def test_the_cores_own_counters_are_passed_on() -> None:
    metrics = ServerMetrics()
    metrics.look_at_engines(
        [
            SchedulerStats(
                num_running=3,
                num_waiting=4,
                kv_cache_usage=0.5,
                prefix_cache_queried_tokens=100,
                prefix_cache_hit_tokens=40,
                prefix_cache_copied_tokens=9,
            )
        ],
        [0],
    )
    values = values_of(metrics)
    assert values["minivllm_prefix_cache_copied_total{engine=0}"] == 9
    assert values["minivllm_num_requests_running{engine=0}"] == 3
    assert values["minivllm_num_requests_waiting{engine=0}"] == 4
    assert values["minivllm_kv_cache_usage_ratio{engine=0}"] == 0.5
    assert (
        values["minivllm_prefix_cache_hits_total{engine=0}"]
        / values["minivllm_prefix_cache_queries_total{engine=0}"]
        == 0.4
    )


def test_engines_count_apart_and_one_that_is_down_keeps_its_last_counters() -> None:
    metrics, line = ServerMetrics(), StatusLine()
    metrics.look_at_engines(
        [SchedulerStats(num_running=3, num_steps=7), SchedulerStats(num_running=4)], [0, 0]
    )
    assert str(line.next(metrics, 1.0)).startswith("running 7 ")
    metrics.look_at_engines([None, SchedulerStats(num_running=5)], [2, 0])
    values = values_of(metrics)
    assert [values[f"minivllm_engine_up{{engine={index}}}"] for index in range(2)] == [0, 1]
    assert [values[f"minivllm_engine_restarts_total{{engine={index}}}"] for index in range(2)] == [2, 0]
    assert [values[f"minivllm_num_requests_running{{engine={index}}}"] for index in range(2)] == [3, 5]
    assert values["minivllm_engine_steps_total{engine=0}"] == 7
    assert str(line.next(metrics, 1.0)).startswith("engines 1 of 2 · running 8 ")


def test_every_pool_of_the_kv_cache_has_its_gauges() -> None:
    metrics = ServerMetrics()
    pools = [
        PoolStats(name="full attention", num_blocks=90, usage=0.5),
        PoolStats(name="window", num_blocks=7, usage=1.0),
    ]
    metrics.look_at_engines([SchedulerStats(kv_cache_usage=1.0, kv_cache_pools=pools)], [0])
    values = values_of(metrics)
    for pool in pools:
        assert values[f"minivllm_kv_cache_pool_blocks{{engine=0,group={pool.name}}}"] == pool.num_blocks
        assert values[f"minivllm_kv_cache_pool_usage_ratio{{engine=0,group={pool.name}}}"] == pool.usage


def test_the_memory_of_every_worker_has_its_gauge() -> None:
    metrics = ServerMetrics()
    metrics.look_at_engines([SchedulerStats(worker_resident_bytes=[10, 20]), None], [0, 0])
    values = values_of(metrics)
    names = {f"minivllm_worker_resident_bytes{{engine=0,rank={rank}}}": 10 * (1 + rank) for rank in range(2)}
    assert {name: value for name, value in values.items() if "resident" in name} == names


def test_speculation_is_counted_in_all_and_by_position() -> None:
    metrics = ServerMetrics()
    assert values_of(metrics)["minivllm_spec_decode_num_drafts_total{engine=0}"] == 0
    metrics.look_at_engines(
        [
            SchedulerStats(
                num_drafts=10,
                num_draft_tokens=30,
                num_accepted_tokens=15,
                num_accepted_tokens_per_position=[8, 5, 2],
            )
        ],
        [0],
    )
    values = values_of(metrics)
    assert values["minivllm_spec_decode_num_drafts_total{engine=0}"] == 10
    assert values["minivllm_spec_decode_num_draft_tokens_total{engine=0}"] == 30
    assert values["minivllm_spec_decode_num_accepted_tokens_total{engine=0}"] == 15
    name = "minivllm_spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[f"{name}{{engine=0,position={position}}}"] for position in range(3)] == [8, 5, 2]


def test_a_clients_long_grammar_does_not_make_labels_without_end() -> None:
    metrics = ServerMetrics()
    metrics.look_at_engines([SchedulerStats(num_accepted_tokens_per_position=[1] * 1000)], [0])
    assert sum("per_pos" in name for name in values_of(metrics)) == MAX_DRAFT_POSITIONS


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    record_stream(first)
    assert values_of(second)["minivllm_generation_tokens_total"] == 0


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    metrics = ServerMetrics()
    metrics.errors.labels("internal")
    metrics.look_at_engines([SchedulerStats(num_accepted_tokens_per_position=[1])], [0])
    exposed = {name.split("{")[0] for name in values_of(metrics)}
    dashboard = json.loads(files("minivllm.metrics").joinpath("grafana_dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 12
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"minivllm_\w+", target["expr"]))
    assert asked and asked <= exposed


def test_the_status_line_tells_rates_and_is_silent_when_nothing_happens() -> None:
    metrics, line = ServerMetrics(), StatusLine()
    assert line.next(metrics, 2.0) is None
    record_stream(metrics)
    metrics.look_at_engines(
        [SchedulerStats(num_running=1, prefix_cache_queried_tokens=10, prefix_cache_hit_tokens=5)], [0]
    )
    text = line.next(metrics, 2.0)
    assert text == ("running 1 · waiting 0 · KV 0% · prompt 2 tok/s · generation 3 tok/s · prefix hits 50%")
    metrics.look_at_engines([SchedulerStats(prefix_cache_queried_tokens=10, prefix_cache_hit_tokens=5)], [0])
    assert line.next(metrics, 2.0) is None
