"""``minivllm bench``: cases and sides are read right, both sides get the same tokens, mistakes get a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm.cli.bench.model import Case, fresh_prompts, parse_case, steady_pool
from minivllm.cli.bench.overhead import timed
from minivllm.cli.bench.sides import Side, parse_side
from minivllm.errors import ConfigError, ModelError


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minivllm.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def test_cases_are_read() -> None:
    assert parse_case("decode:16") == Case("decode", 16, 128, 64)
    assert parse_case("decode:2:300") == Case("decode", 2, 300, 64)
    assert parse_case("prefill:512") == Case("prefill", 1, 512, 1)


@pytest.mark.parametrize("text", ["", "decode", "decode:0", "decode:a", "decode:1:2:3", "prefill:1:2", "sort:3"])
def test_another_case_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="decode:BATCH"):
        parse_case(text)


def test_sides_are_read() -> None:
    assert parse_side("transformers", "m", "auto") == ("transformers", {"model": "m", "dtype": "auto"})
    engine, arguments = parse_side("minivllm,enable_prefix_caching=false,block_size=32,dtype=float32", "m", "auto")
    assert engine == "minivllm"
    assert arguments == {"model": "m", "dtype": "float32", "enable_prefix_caching": False, "block_size": 32}


@pytest.mark.parametrize("text", ["vllm", "minivllm,eager", "transformers,block_size=3"])
def test_another_side_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_side(text, "m", "auto")


def test_prompts_differ_between_repetitions_and_are_the_same_for_everyone() -> None:
    case = parse_case("decode:3:20")
    assert fresh_prompts(case, "0/first", 50) == fresh_prompts(case, "0/first", 50)
    assert fresh_prompts(case, "0/first", 50) != fresh_prompts(case, "1/first", 50)
    assert all(len(prompt) == 20 and max(prompt) < 50 for prompt in fresh_prompts(case, "0/first", 50))


def test_the_pool_holds_the_largest_case_twice() -> None:
    cases = [parse_case("decode:16:128"), parse_case("prefill:512")]
    assert steady_pool(cases, 64) == 2 * 16 * 10 + 1, "577 tokens are 10 blocks"


def test_a_timed_method_works_as_before_and_is_put_back() -> None:
    class Sleeper:
        def sleep(self, seconds: float) -> float:
            time.sleep(seconds)
            return seconds

    sleeper, seconds = Sleeper(), []
    with timed(sleeper, "sleep", seconds):
        assert sleeper.sleep(0.01) == 0.01
    assert len(seconds) == 1 and seconds[0] >= 0.01
    assert sleeper.sleep.__func__ is Sleeper.sleep


def test_a_side_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"stopped: .*config\.json"):
        Side("minivllm", "minivllm", {"model": str(tmp_path)})


def test_wrong_usage_exits_2_with_a_sentence() -> None:
    result = bench("model", "--vs", "vllm")
    assert result.returncode == 2
    assert "known are" in result.stderr and "Traceback" not in result.stderr


def test_both_sides_generate_the_same_and_the_figures_are_written(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    result = bench(
        "model", str(tiny_model("llama")), "--engine", "minivllm,enforce_eager=true", "--vs", "transformers",
        "--case", "decode:2:9", "--case", "prefill:24", "--repeats", "1", "--dtype", "float32", "--json", str(file),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert set(figures["agreement"].values()) == {1.0}
    assert len(figures["measurements"]) == 4
    assert all(entry["tokens_per_second"] > 0 for entry in figures["measurements"])
    assert "ratio" in result.stdout


def test_overhead_names_every_part_outside_the_model(tiny_model: Callable[..., Path]) -> None:
    result = bench("overhead", str(tiny_model("llama")), "--running", "4", "--steps", "12", "--prompt-tokens", "5")
    assert result.returncode == 0, result.stderr
    for part in ("schedule", "build inputs", "update from output", "frontend", "overhead", "whole step"):
        assert part in result.stdout
