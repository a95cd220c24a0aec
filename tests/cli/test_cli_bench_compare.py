"""``bench compare`` and the report: what was written is read back, and a regression is told from noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from typer.testing import CliRunner

from minivllm.bench.command import bench
from minivllm.bench.reports.report import (
    HEADER,
    SCHEMA_VERSION,
    Better,
    Comparison,
    Measurement,
    OutputOptions,
    Report,
    changes,
    make_report,
    publish,
    read_report,
    read_results,
    rows,
)
from minivllm.errors import ModelError, RequestError


def measurement(samples: list[float], metric: str = "speed", better: Better = "higher") -> Measurement:
    return Measurement(
        case="decode", side="minivllm", metric=metric, unit="tok/s", better=better, samples=samples
    )


def noisy(middle: float, seed: int = 0, count: int = 20) -> list[float]:
    source = random.Random(seed)
    return [middle * source.uniform(0.98, 1.02) for _ in range(count)]


def written(path: Path, *measurements: Measurement) -> Path:
    publish(make_report("model", {"model": "m"}, measurements), OutputOptions(json_file=path))
    return path


def run_compare(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(bench, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    comparison = Comparison(
        case="decode", metric="speed", side="a", against="b", ratio=2.0, low=1.5, high=2.5, agreement=0.75
    )
    report = make_report(
        "model", {"dtype": "auto", "n": 3}, [measurement([1.0, 2.5])], [comparison], ["a note"]
    )
    publish(report, OutputOptions(json_file=tmp_path / "r.json"))
    assert read_report(tmp_path / "r.json") == report
    assert report.versions["torch"] and report.machine["cpu"]["usable_cores"] >= 1 and report.created


def test_the_schema_of_a_report_accepts_it_and_nothing_else(tmp_path: Path) -> None:
    schema = msgspec.json.schema(Report)
    content = json.loads(written(tmp_path / "r.json", measurement([1.0])).read_bytes())
    jsonschema.validate(content, schema)
    assert content["schema_version"] == SCHEMA_VERSION
    for name, value in (("measurements", [{}]), ("kind", 3), ("surprise", 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content | {name: value}, schema)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("x", "holds no results"), ("[]", "holds no results"), ('{"schema_version": 1}', "schema version 1")],
)
def test_another_file_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(RequestError, match=reason):
        read_results(tmp_path / "r.json")


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be written"):
        written(tmp_path / "no" / "r.json", measurement([1.0]))


def test_the_table_has_every_measurement_under_its_header() -> None:
    report = make_report("model", {}, [measurement(noisy(5.0)), measurement([1.0], "errors", "lower")])
    table = rows(report)
    assert [len(row) for row in table] == [len(HEADER)] * 2
    assert table[0][3] == "20" and table[0][6] == "n/a", "20 samples have no p99"


@pytest.mark.parametrize(
    ("before", "after", "better", "verdict"),
    [
        (100.0, 90.0, "higher", "worse"),
        (100.0, 110.0, "higher", "better"),
        (100.0, 110.0, "lower", "worse"),
        (100.0, 90.0, "lower", "better"),
        (100.0, 98.0, "higher", "same"),
    ],
)
def test_a_change_beyond_the_threshold_is_told(
    tmp_path: Path, before: float, after: float, better: Better, verdict: str
) -> None:
    old = written(tmp_path / "a.json", measurement(noisy(before), better=better))
    new = written(tmp_path / "b.json", measurement(noisy(after, seed=1), better=better))
    [change] = changes(read_results(old), read_results(new), threshold=0.05)
    assert change.verdict == verdict
    assert change.low <= change.ratio <= change.high


def test_noise_is_no_regression(tmp_path: Path) -> None:
    wild = [20.0, 50.0, 80.0, 100.0, 120.0, 150.0, 180.0]
    old = written(tmp_path / "a.json", measurement(wild))
    new = written(tmp_path / "b.json", measurement([0.85 * value for value in wild]))
    [change] = changes(read_results(old), read_results(new), threshold=0.05)
    assert change.ratio < 0.95 and change.verdict == "same", "the interval reaches beyond 1"


def test_the_exit_code_says_whether_something_became_worse(tmp_path: Path) -> None:
    old = written(tmp_path / "a.json", measurement(noisy(100.0)), measurement([0.0], "errors", "lower"))
    same = written(
        tmp_path / "b.json", measurement(noisy(100.0, seed=1)), measurement([0.0], "errors", "lower")
    )
    slower = written(tmp_path / "c.json", measurement(noisy(80.0)), measurement([0.0], "errors", "lower"))
    failing = written(tmp_path / "d.json", measurement(noisy(100.0)), measurement([2.0], "errors", "lower"))
    assert run_compare(old, same)[0] == 0
    code, text = run_compare(old, slower)
    assert code == 1 and "1 of 2 became worse by more than 5%" in text
    assert run_compare(old, slower, "--threshold", "0.3")[0] == 0
    assert run_compare(old, failing)[0] == 1, "errors are a regression"
    assert run_compare(slower, old)[0] == 0, "faster is no regression"


def test_files_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    old = written(tmp_path / "a.json", measurement([1.0]))
    new = written(tmp_path / "b.json", measurement([1.0], "another"))
    result = CliRunner().invoke(bench, ["compare", str(old), str(new)])
    assert isinstance(result.exception, RequestError)
    assert "no measurement in common" in str(result.exception)


def pytest_file(path: Path, **seconds: list[float]) -> Path:
    entries: list[dict[str, Any]] = [
        {
            "fullname": f"tests/test_bench.py::{name}",
            "stats": {"median": sorted(data)[len(data) // 2], "data": data},
        }
        for name, data in seconds.items()
    ]
    path.write_text(json.dumps({"machine_info": {"cpu": {"brand_raw": "some"}}, "benchmarks": entries}))
    return path


def test_files_of_pytest_benchmark_are_compared_as_well(tmp_path: Path) -> None:
    old = pytest_file(tmp_path / "a.json", norm=noisy(1e-3), rotary=noisy(2e-3))
    new = pytest_file(tmp_path / "b.json", norm=noisy(1.3e-3, seed=1), rotary=noisy(2e-3, seed=1))
    code, text = run_compare(old, new)
    assert code == 1 and "1 of 2 became worse" in text
    assert run_compare(old, old)[0] == 0
    (tmp_path / "c.json").write_text('{"benchmarks": [{"fullname": "x"}]}')
    with pytest.raises(RequestError, match="no times"):
        read_results(tmp_path / "c.json")


def test_what_pytest_benchmark_really_writes_is_read(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    (tmp_path / "test_it.py").write_text(
        "def test_it(benchmark):\n    benchmark.pedantic(len, args=([],), rounds=5)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--benchmark-json",
        "r.json",
        "test_it.py",
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120, env=alone)
    [series] = read_results(tmp_path / "r.json").series.values()
    assert len(series.samples) == 5 and series.unit == "ms"
