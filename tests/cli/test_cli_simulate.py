"""Simulated engines: times by hand, nothing lost but what dies,
fits that give back what they were made from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Measurement, make_report
from minivllm.bench.requests.workloads import arrive, make_workload
from minivllm.bench.sides.drive import Answer, Task
from minivllm.bench.simulation.check import COMPARED, measure_step_time, verdicts
from minivllm.bench.simulation.cluster import LOST, NOBODY, Cluster, Failure, Outcome, run_cluster
from minivllm.bench.simulation.command import figures_of, figures_of_answer
from minivllm.bench.simulation.step_time import StepTime, fit_step_time, parse_step_time
from minivllm.cli.main import main
from minivllm.config import SchedulerConfig
from minivllm.data_parallel.policy import PrefixAffinity, RoundRobin
from minivllm.errors import ConfigError, ModelError, RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.sampling_params import SamplingParams
from tests.data_parallel.test_clients import client_of

TIME = StepTime(1.0, 0.25, 0.5)


def cluster(num_engines: int = 1, *failures: Failure, budget: int = 64, num_blocks: int = 200) -> Cluster:
    return Cluster(
        num_engines=num_engines,
        step_time=TIME,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=400),
        block_size=4,
        num_blocks=num_blocks,
        failures=failures,
    )


def test_times_are_those_of_the_steps() -> None:
    """A prompt of 8 tokens, and another one of 4 that comes while the first is computed and joins the second
    step."""
    tasks = [Task([1] * 8, 3), Task([2] * 4, 2, arrival=0.5)]
    outcome = run_cluster(cluster(), RoundRobin(), tasks)
    first = 1 + 8 * 0.25
    second = first + 1 + 0.5 + 4 * 0.25
    third = second + 1 + 2 * 0.5
    assert outcome.records[0].times == [first, second, third]
    assert (outcome.records[1].arrival, outcome.records[1].times) == (0.5, [second, third])
    assert outcome.seconds == third and outcome.computed == [8 + 2 + 4 + 1]


def test_requests_of_one_moment_are_in_one_step() -> None:
    outcome = run_cluster(
        cluster(), RoundRobin(), [Task([number] * 4, 1, arrival=1.5) for number in range(3)]
    )
    assert [record.times for record in outcome.records] == [[1.5 + 1 + 12 * 0.25]] * 3


def test_prompts_are_computed_in_chunks_of_the_budget_and_found_again() -> None:
    tasks = [Task([1] * 10, 1), Task([1] * 10, 1, after=0, arrival=2.0)]
    outcome = run_cluster(cluster(budget=4), RoundRobin(), tasks)
    whole = 3 * 1 + 10 * 0.25
    assert outcome.records[0].times == [whole]
    assert outcome.records[1].arrival == whole + 2.0
    assert outcome.records[1].times == [whole + 2.0 + 1 + 2 * 0.25]  # two blocks of four were there
    assert (outcome.queried, outcome.hits) == (20, 8)


def test_a_death_costs_its_own_requests_and_the_cache() -> None:
    tasks = [
        Task([1] * 8, 50),
        Task([2] * 8, 50),
        Task([1] * 8, 1, arrival=200.0),
        Task([3] * 8, 1, arrival=12.0),
    ]
    outcome = run_cluster(cluster(2, Failure(0, 10.0, 5.0)), RoundRobin(), tasks)
    lost, kept, late, meanwhile = outcome.records
    assert lost.error == LOST and 0 < len(lost.token_ids) < 50 and max(lost.times) <= 10.0
    assert kept.error is None and len(kept.token_ids) == 50
    assert late.error is None and meanwhile.error is None and outcome.hits == 0
    both = run_cluster(cluster(2, Failure(0, 10.0, 5.0), Failure(1, 11.0, 5.0)), RoundRobin(), tasks)
    assert [one.error for one in both.records] == [LOST, LOST, None, NOBODY]


@settings(max_examples=40)
@given(
    num_engines=st.integers(1, 4),
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 12), st.floats(0, 30)), min_size=1, max_size=20
    ),
    failures=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 60), st.floats(0, 20)), max_size=3),
    num_blocks=st.sampled_from([14, 30, 200]),
    policy=st.sampled_from([PrefixAffinity, RoundRobin]),
)
def test_every_request_ends_once_and_only_deaths_lose_any(
    num_engines: int, requests: list[Any], failures: list[Any], num_blocks: int, policy: Any
) -> None:
    tasks = [Task([length % 3] * length, count, arrival) for length, count, arrival in requests]
    deaths = [Failure(engine % num_engines, at, seconds) for engine, at, seconds in failures]
    outcome = run_cluster(cluster(num_engines, *deaths, num_blocks=num_blocks), policy(), tasks)
    for task, record in zip(tasks, outcome.records):
        assert record.arrival == task.arrival and record.times == sorted(record.times)
        if record.error is None:
            assert len(record.token_ids) == task.max_tokens and record.times[0] > task.arrival
        else:
            assert deaths and record.error in (LOST, NOBODY)
    assert 0 <= outcome.hits <= outcome.queried
    assert outcome.seconds >= max((one.times[-1] for one in outcome.records if one.times), default=0.0)


def hit_rates(num_engines: int) -> dict[str, float]:
    tasks = arrive(make_workload("multi-turn:60:4:64:8", 1000), "poisson:0.05")
    found = {}
    for name, policy, count in (
        ("prefix", PrefixAffinity(), num_engines),
        ("round", RoundRobin(), num_engines),
    ):
        found[name] = run_cluster(
            replace(cluster(count, num_blocks=5000), step_time=TIME), policy, tasks
        ).hit_rate
    found["one"] = run_cluster(cluster(1, num_blocks=5000), RoundRobin(), tasks).hit_rate
    return found


def test_affinity_finds_nearly_what_one_engine_finds_and_turns_do_not() -> None:
    found = hit_rates(8)
    assert found["prefix"] >= 0.95 * found["one"] > 2 * found["round"]


@pytest.mark.parametrize("policy", [PrefixAffinity, RoundRobin])
def test_two_real_processes_find_what_the_simulated_ones_find(policy: Any) -> None:
    """One request after the other, in caches that are too small for all:
    every hit and every eviction is the same."""
    chain = [
        replace(task, after=number - 1 if number else None)
        for number, task in enumerate(make_workload("prefix-groups:7:5:80:20:8", 900))
    ]

    async def real() -> list[int]:
        client = client_of(policy=policy(), num_gpu_blocks_override=30)
        async with AsyncLLM(client) as llm:
            for task in chain:
                params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
                _ = [one async for one in llm.generate({"prompt_token_ids": task.prompt}, params)]
            each = [stats for stats in await llm.engine_stats() if stats is not None]
            return [
                sum(one.prefix_cache_hit_tokens for one in each),
                *(one.num_computed_tokens for one in each),
            ]

    simulated = replace(cluster(2, num_blocks=30), block_size=16)
    outcome = run_cluster(simulated, policy(), chain)
    assert asyncio.run(real()) == [outcome.hits, *outcome.computed]
    assert 0 < outcome.hits < outcome.queried


def report_of(time: StepTime, batches: list[int], prompt: int | None, budget: int = 2048) -> Any:
    speeds = [(f"decode 64, batch {b}, prompt 128", b / time.seconds(0, b)) for b in batches]
    if prompt is not None:
        steps = -(-prompt // budget)
        speeds.append((f"prefill {prompt}", prompt / (steps * time.base + prompt * time.prompt_token)))
    measurements = [
        Measurement(case, "minivllm", "speed", "tok/s", "higher", [speed]) for case, speed in speeds
    ]
    facts = {"sides": {"minivllm": {"max_num_batched_tokens": budget}}}
    return make_report("model", facts, measurements)


@pytest.mark.parametrize("budget", [2048, 128])
def test_a_fit_gives_back_the_time_it_was_made_from(budget: int) -> None:
    time = StepTime(0.02, 0.0017, 0.0023)
    fitted = fit_step_time(report_of(time, [1, 4, 16], 512, budget))
    assert (fitted.base, fitted.prompt_token, fitted.decode) == pytest.approx((0.02, 0.0017, 0.0023))
    for batches, prompt in (([4], 512), ([1, 4], None), ([], 512)):
        with pytest.raises(RequestError, match="does not tell how long a step takes"):
            fit_step_time(report_of(time, batches, prompt))
    parsed = parse_step_time("20,1.7,2.3")
    assert (parsed.base, parsed.prompt_token, parsed.decode) == pytest.approx((0.02, 0.0017, 0.0023))
    for text in ("", "1,2", "a,b,c", "-1,2,3", "0,0,0", "inf,1,1"):
        with pytest.raises(ConfigError, match="--step-ms is"):
            parse_step_time(text)


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    return int(ended.value.code or 0)


def test_the_command_compares_policies_and_one_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    code = run_command(
        "--step-ms=20,1.7,2.3", "--workload=multi-turn:12:3:64:8", "--arrivals=poisson:1", "--data-parallel-size=3",
        "--failure=0:3:5", f"--json={path}",
    )  # fmt: skip
    assert code == 0
    report = json.loads(path.read_text())
    assert {one["side"] for one in report["measurements"]} == {"prefix", "round_robin", "one engine"}
    assert {one["against"] for one in report["comparisons"]} == {"round_robin"}
    hits = {
        one["side"]: one["samples"][0]
        for one in report["measurements"]
        if one["metric"] == "prefix cache hits"
    }
    assert hits["one engine"] > hits["prefix"] > hits["round_robin"]
    assert "round_robin: prefix cache hits" in capsys.readouterr().out


def test_the_command_compares_scheduling_policies(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code = run_command(
        "--step-ms=20,1,1", "--workload=prefix-groups:6:6:256:32:4", "--arrivals=poisson:20", "--policy=round_robin",
        "--data-parallel-size=1", "--block-size=16", "--num-blocks=44", "--max-num-seqs=4", f"--json={path}",
        "--scheduling-policy=fcfs", "--scheduling-policy=response-ratio",
    )  # fmt: skip
    assert code == 0
    report = json.loads(path.read_text())
    hits = {
        one["side"]: one["samples"][0]
        for one in report["measurements"]
        if one["metric"] == "prefix cache hits"
    }
    assert hits.keys() == {"round_robin, fcfs", "round_robin, response-ratio"}
    assert hits["round_robin, response-ratio"] > 1.5 * hits["round_robin, fcfs"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give either --fit or --step-ms"),
        (("--step-ms=1,1,1", "--fit=x.json"), "give either --fit or --step-ms"),
        (("--step-ms=1,1,1", "--failure=2:1:1"), "must be ENGINE:AT:SECONDS with an engine below 2"),
        (("--step-ms=1,1,1", "--failure=0:x"), "must be ENGINE:AT:SECONDS"),
        (("--step-ms=1,1,1", "--num-blocks=3"), "give it more --num-blocks"),
        (("--step-ms=1,1,1", "--policy=nearest"), "data_parallel_policy is 'nearest'"),
        (("--step-ms=1,1,1", "--scheduling-policy=lifo"), "scheduling_policy is 'lifo'"),
        (
            ("--check=x", "--scheduling-policy=fcfs", "--scheduling-policy=priority"),
            "one policy under one load",
        ),
        (("--step-ms=1,1,1", "--arrivals=never"), "--arrivals is 'never'"),
        (("--step-ms=1,1,1", "--arrivals=trace", "--rates=1,2"), "--rates and --arrivals exclude each other"),
        (("--step-ms=1,1,1", "--rates=2,1"), "--rates is '2,1'"),
        (("--check=x,block_size=3",), "--check names block_size, which has an option of its own"),
        (("--check=dtype=float32",), "must be MODEL or MODEL,ARGUMENT=VALUE"),
        (("--check=x", "--failure=0:1:1"), "nobody kills real engines"),
        (("--check=x", "--workload=fixed:1:4:4", "--num-blocks=5"), "--check needs a KV cache of"),
        (("--check=x", "--rates=1,2"), "one policy under one load"),
    ],
)
def test_what_cannot_be_simulated_gets_a_sentence(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@dataclass(frozen=True)
class SimulatedSide:
    """Stands in for real engines."""

    cluster: Cluster

    def run(self, tasks: Sequence[Task]) -> Answer:
        outcome = run_cluster(self.cluster, RoundRobin(), tasks)
        return Answer(outcome.seconds, outcome.records, 0, {"cache_hit_rate": outcome.hit_rate})


@pytest.mark.parametrize("num_engines", [1, 3])
def test_timed_steps_of_engines_are_those_that_they_take(num_engines: int) -> None:
    """Also where engines slow one another."""
    time = replace(TIME, alone=StepTime(TIME.base / 2, TIME.prompt_token / 3, TIME.decode / 2))
    engines = SimulatedSide(replace(cluster(num_engines, budget=100, num_blocks=400), step_time=time))
    found = measure_step_time(engines, num_engines, 100, 900)
    expected = [time.alone] if num_engines == 1 else [time, time.alone]
    for one, other in zip([found] if num_engines == 1 else [found, found.alone], expected):
        assert one is not None and other is not None
        assert (one.base, one.prompt_token, one.decode) == pytest.approx(
            (other.base, other.prompt_token, other.decode)
        )


def test_a_step_takes_longer_while_others_compute() -> None:
    time = replace(TIME, alone=StepTime(0.5, 0.125, 0.25))
    tasks = [Task([1] * 8, 1), Task([2] * 8, 1), Task([3] * 8, 1, arrival=100)]
    outcome = run_cluster(replace(cluster(2), step_time=time), RoundRobin(), tasks)
    assert [record.times for record in outcome.records] == [[1 + 8 * 0.25]] * 2 + [[100 + 0.5 + 8 * 0.125]]


def test_engines_that_answer_too_little_tell_nothing() -> None:
    with pytest.raises(ModelError, match="how long their steps take is not known"):
        measure_step_time(SimulatedSide(cluster(1, Failure(0, 0.5, 1.0))), 1, 64, 900)


def test_a_check_says_what_was_predicted_and_what_was_measured() -> None:
    tasks = [Task([1] * 8, 3), Task([2] * 4, 2, arrival=0.5)]
    outcome = run_cluster(cluster(), RoundRobin(), tasks)
    slower = SimulatedSide(replace(cluster(), step_time=StepTime(2.0, 0.5, 1.0)))
    [first, *_] = said = verdicts(figures_of(outcome), figures_of_answer(slower.run(tasks)))
    assert first.startswith("TTFT: predicted ") and first.endswith(": 0.48 ×.")
    assert [one.partition(":")[0] for one in said] == [
        *COMPARED[:3],
        "requests",
        "output",
        "prefix cache hits",
    ]


def test_a_curve_has_a_point_for_every_rate(tmp_path: Path) -> None:
    path, picture = tmp_path / "report.json", tmp_path / "load.png"
    code = run_command(
        "--step-ms=20,1.7,2.3", "--workload=random:9:4:12", "--rates=1,8", "--policy=prefix", f"--json={path}",
        "--data-parallel-size=1", f"--png={picture}",
    )  # fmt: skip
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(path.read_text())
    points = {one["x"]: median(one["samples"]) for one in report["measurements"] if one["metric"] == "TTFT"}
    assert set(points) == {1.0, 8.0} and points[8.0] >= points[1.0]


@pytest.mark.slow
def test_two_real_engines_are_checked(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "report.json", tiny_model("llama", max_position_embeddings=512)
    code = run_command(
        f"--check={model},enforce_eager=true,device=cpu", "--workload=multi-turn:2:3:60:4", "--block-size=16",
        "--num-blocks=80", f"--json={path}",
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0
    report = json.loads(path.read_text())
    assert {one["side"] for one in report["measurements"]} == {"predicted", "measured"}
    assert report["configuration"]["step_time"]["base"] > 0
    hits = {
        one["side"]: one["samples"] for one in report["measurements"] if one["metric"] == "prefix cache hits"
    }
    assert hits["predicted"] == pytest.approx(hits["measured"]) and hits["measured"][0] > 0
    for name in ("TTFT", "ITL", "output"):
        assert f"{name}: predicted " in said


def test_hit_rate_of_nothing_is_zero() -> None:
    assert Outcome([]).hit_rate == 0.0
