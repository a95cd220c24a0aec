"""``minivllm bench disaggregated``:
the figures are those of the right servers, and real ones start and end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minivllm.bench.disaggregated import (
    APART,
    LOADED,
    ONE,
    Servers,
    against_one,
    itl_under_load,
    ttft_by_length,
)
from minivllm.bench.reports.report import Measurement
from minivllm.bench.serve import Target
from minivllm.errors import ModelError
from tests.server.serving import ScriptedCore, Scripts, ServedCore, served
from tests.server.test_proxy import proxied


@pytest.fixture(scope="module")
def scripted(scripts: Scripts) -> Iterator[tuple[Servers, list[ServedCore]]]:
    def make() -> object:
        return served(ScriptedCore(scripts), scripts.tokenizer, served_model_names=("tiny",))

    with make() as one, make() as prefill, make() as decode, proxied([prefill], [decode]) as proxy:  # type: ignore[attr-defined]
        targets = [Target(url=server.url).found() for server in (one, proxy, prefill, decode)]
        yield Servers(*targets), [one, prefill, decode]


def test_prompts_are_prefilled_where_they_should_be_and_nowhere_else(
    scripted: tuple[Servers, list[ServedCore]],
) -> None:
    servers, (one, prefill, decode) = scripted
    found = ttft_by_length(servers, [30, 60], repeats=2, vocab_size=300)
    assert [(entry.case, entry.side, len(entry.samples)) for entry in found] == [
        (f"prompt of {length}", side, 2) for length in (30, 60) for side in (ONE, LOADED, APART)
    ]
    prompts = [
        [tuple(request.prompt_token_ids) for request in server.core.admitted]
        for server in (one, prefill, decode)
    ]
    assert [len(own) for own in prompts] == [6, 12, 12] and len(set(prompts[0])) == 6
    assert set(prompts[1]) == set(prompts[2]) and not set(prompts[0]) & set(prompts[1])


def test_streams_and_late_prompts_are_told_apart_and_failures_end_it(
    scripted: tuple[Servers, list[ServedCore]],
) -> None:
    servers, _ = scripted
    found = itl_under_load(servers, "prefill-load:2:6:2:30:0.05", rounds=2, vocab_size=300)
    counts = {(entry.side, entry.metric): len(entry.samples) for entry in found}
    assert (
        all(counts[side, "TTFT"] == 4 and counts[side, "ITL"] > 4 for side in (ONE, APART))
        and len(counts) == 4
    )
    with pytest.raises(ModelError, match=r"A request to http://.* failed: HTTP 400"):
        ttft_by_length(servers, [5000], repeats=1, vocab_size=300)


def test_every_side_is_compared_with_the_one_engine() -> None:
    def ttft(side: str, value: float) -> Measurement:
        return Measurement("prompt of 8", side, "TTFT", "ms", "lower", [value] * 3)

    found = against_one([ttft(ONE, 10.0), ttft(LOADED, 5.0), ttft(APART, 20.0)])
    assert [(one.side, one.against, one.ratio) for one in found] == [(LOADED, ONE, 2.0), (APART, ONE, 0.5)]


@pytest.mark.slow
def test_the_command_measures_real_engines(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minivllm.cli.main", "bench", "disaggregated", str(tiny_model("llama"))]
    command += [
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--num-gpu-blocks-override",
        "80",
        "--vocab-size",
        "400",
    ]
    command += [
        "--lengths",
        "64,256",
        "--repeats",
        "1",
        "--rounds",
        "1",
        "--workload",
        "prefill-load:2:30:2:200:0.2",
    ]
    report = tmp_path / "report.json"
    result = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    assert {one["side"] for one in json.loads(report.read_text())["measurements"]} == {ONE, LOADED, APART}
