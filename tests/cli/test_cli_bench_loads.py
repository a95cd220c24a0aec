"""``bench throughput`` and ``model --ablate`` on a real engine that lives in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from minivllm.bench.command import bench
from minivllm.bench.engines import knee_note
from minivllm.bench.reports.report import Measurement, Report, read_report
from minivllm.bench.rounds import rounds
from minivllm.bench.rounds.side_processes import SideSpec
from minivllm.bench.sides.drive import Answer, Task, drive
from minivllm.bench.sides.side_minivllm import load, ranks_of
from minivllm.errors import ConfigError


class SideInThisProcess:
    """A side without a process of its own, eager, so that a test takes a second."""

    def __init__(self, spec: SideSpec) -> None:
        self.name = spec.name
        self._engine = load(spec.arguments | {"enforce_eager": True})
        self.facts = self._engine.facts

    def run(self, tasks: Sequence[Task], own_way: bool = False) -> Answer:
        self._engine.reset()
        records, seconds = drive(self._engine, tasks)
        return Answer(seconds, records, 1, self._engine.counters())

    def __enter__(self) -> SideInThisProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.engine.close()


@pytest.fixture
def measured(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Report, str]]]:
    """Runs a command on a small model and gives its report and what it printed."""
    monkeypatch.setattr(rounds, "Side", SideInThisProcess)

    def run(command: str, *flags: str) -> tuple[Report, str]:
        file = tmp_path / "report.json"
        result = CliRunner().invoke(bench, [command, str(tiny_model("llama")), *flags, "--json", str(file)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return read_report(file), result.output

    yield run


def samples(report: Report, metric: str) -> list[list[float]]:
    return [one.samples for one in report.measurements if one.metric == metric]


def test_throughput_has_one_latency_per_request_and_one_per_gap(
    measured: Callable[..., tuple[Report, str]],
) -> None:
    report, text = measured("throughput", "--workload", "fixed:2:9:5", "--repeats", "3")
    for metric, count in (("TTFT", 6), ("TPOT", 6), ("E2E", 6), ("ITL", 24)):
        [values] = samples(report, metric)
        assert len(values) == count and min(values) > 0, metric
    assert "ITL" in text and samples(report, "errors") == [[0]]


def test_throughput_counts_tokens_hits_and_what_was_shared(
    measured: Callable[..., tuple[Report, str]],
) -> None:
    report, _ = measured(
        "throughput", "--workload", "shared-prefix:4:128:8:4", "--workload", "multi-turn:1:2:70:4",
        "--workload", "poisson:6:200:5:9", "--repeats", "1", "--at-a-time", "8",
    )  # fmt: skip
    rates = dict(
        zip([one.case for one in report.measurements if one.metric == "output"], samples(report, "output"))
    )
    assert list(rates) == ["shared-prefix:4:128:8:4", "multi-turn:1:2:70:4", "poisson:6:200:5:9"]
    assert all(rate[0] > 0 for rate in rates.values())
    hits = {one.case: one.samples for one in report.measurements if one.metric == "prefix cache hits"}
    assert hits["multi-turn:1:2:70:4"][0] == pytest.approx(64 / (70 + 144)), (
        "one block of the first turn's prompt"
    )
    assert hits["poisson:6:200:5:9"] == [0.0], (
        "fresh prompts, and every run starts with an empty prefix cache"
    )
    assert [len(values) for values in samples(report, "TTFT")] == [4, 2, 6]


def test_a_sweep_has_a_point_for_every_load_and_names_the_knee(
    measured: Callable[..., tuple[Report, str]],
) -> None:
    report, text = measured("throughput", "--batches", "1,2,3", "--workload", "fixed:9:5:4", "--repeats", "1")
    assert [one.x for one in report.measurements if one.metric == "output"] == [1.0, 2.0, 3.0]
    assert "knee" in text
    report, _ = measured("throughput", "--rates", "50,100", "--workload", "fixed:3:5:4", "--repeats", "1")
    assert [one.case for one in report.measurements if one.metric == "requests"] == [
        "fixed:3:5:4 at 50/s", "fixed:3:5:4 at 100/s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rates", "1,2", "--batches", "1,2"], "exclude each other"),
        (["--batches", "1,2", "--workload", "nano-256"], "goes with one fixed workload, not with nano-256"),
        (["--rates", "2,1"], "--rates is '2,1', but must be ascending numbers"),
    ],
)
def test_another_sweep_is_refused(
    measured: Callable[..., tuple[Report, str]], flags: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        measured("throughput", *flags)


def test_requests_of_a_side_with_adapters_use_random_ones_in_turn(tiny_model: Callable[..., Path]) -> None:
    side = load({"model": str(tiny_model("llama")), "enforce_eager": True, "lora": 2, "max_lora_rank": 20})
    with side.engine as engine:
        assert [adapter.name for adapter in engine.list_loras()] == ["random-0", "random-1"]
        assert not any(Path(adapter.path).exists() for adapter in engine.list_loras()), "they are in memory"
        used: list[str] = []
        add_request = engine.add_request

        def recording(*args: Any, **kwargs: Any) -> Any:
            used.append(kwargs["lora"].name)
            return add_request(*args, **kwargs)

        with patch.object(engine, "add_request", recording):
            records, _ = drive(side, [Task([5, 6, 7], 3) for _ in range(3)])
    assert used == ["random-0", "random-1", "random-0"]
    assert [(len(record.token_ids), record.error) for record in records] == [(3, None)] * 3


def test_ranks_of_random_adapters_are_mixed_as_far_as_there_is_room() -> None:
    assert ranks_of(5, 64) == [8, 16, 32, 64, 8]
    assert ranks_of(3, 20) == [8, 16, 8]
    assert ranks_of(2, 4) == [4, 4]


@pytest.mark.parametrize("count", [-1, "four", True, 1.5])
def test_a_number_of_adapters_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match=r"lora is .*, but must be a number of adapters"):
        load({"model": "any", "lora": count})


def test_the_knee_is_where_the_rate_stops_following_the_load() -> None:
    rates = {1.0: 10.0, 2.0: 20.0, 4.0: 40.0, 8.0: 42.0, 16.0: 43.0}
    points = [
        Measurement(case=f"{x}", side="s", metric=metric, unit="u", better="higher", samples=[value], x=x)
        for x, rate in rates.items()
        for metric, value in (("output", rate), ("TPOT", 100 * x / rate))
    ]
    note = knee_note("s", "batch", points)
    assert "the knee is at batch 4: 40 output tok/s at a TPOT of 10 ms" in note and "1.07 ×" in note
    straight = [one for one in points if one.x is not None and one.x <= 4]
    assert "no knee up to batch 4" in knee_note("s", "batch", straight)


@pytest.mark.slow
def test_ablation_prints_what_each_feature_is_worth(measured: Callable[..., tuple[Report, str]]) -> None:
    report, text = measured("model", "--ablate", "--case", "shared-prefix:2:97:33:64", "--repeats", "1")
    assert "prefix cache: " in text and "chunked prefill: " in text and "compile: " in text
    assert {comparison.agreement for comparison in report.comparisons} == {1.0}, "features change no token"
    with pytest.raises(ConfigError, match="compares minivllm with itself"):
        measured("model", "--ablate", "--vs", "transformers")
