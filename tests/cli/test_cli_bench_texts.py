"""``minivllm bench model --case text:KIND``:
seeded prompts in words, tokens per step, mistakes in a sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm.bench.command import bench as bench_app
from minivllm.bench.requests.texts import NUM_PROMPTS, PROMPTS, TextCase
from minivllm.bench.sides.drive import Answer, Record, Task
from minivllm.errors import ConfigError


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_follow_from_kind_and_repetition_and_have_room(kind: str) -> None:
    case = TextCase(kind, lambda text: list(text.encode()), 16)
    assert case.tasks(300, 1) == case.tasks(300, 1)
    prompts = [case.tasks(300, repetition)[0].prompt for repetition in range(-1, 2 * NUM_PROMPTS)]
    assert len(set(map(tuple, prompts))) > 1
    assert max(map(len, prompts)) + case.new_tokens == case.room.longest


def test_the_code_to_repair_lacks_nothing_but_colons() -> None:
    """The judge is Python's own compiler:
    broken as it is, sound once every line that opens a block has its colon."""
    prompt = PROMPTS["repair"](random.Random(0))
    code = prompt.split("```python\n")[1].removesuffix("```")
    with pytest.raises(SyntaxError, match="expected ':'"):
        compile(code, "prompt", "exec")
    opens = ("def ", "for ", "if ", "elif ")
    lines = [
        line.rstrip(":") + ":" if line.lstrip().startswith(opens) else line for line in code.splitlines()
    ]
    compile("\n".join(lines), "repaired", "exec")


def test_tokens_per_step_count_those_that_came_together() -> None:
    record = Record(token_ids=[1] * 7, times=[1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0])
    case = TextCase("edit", lambda text: [1], 7)
    speed, per_step = case.figures([Task([1], 7)], Answer(3.0, [record], 0, {}))
    assert speed.samples == [6 / 3.0] and per_step.samples == [6 / 3]


def test_tokens_after_the_end_of_the_answer_do_not_count() -> None:
    record = Record(token_ids=[5, 5, 5, 2, 5, 2, 5], times=[1.0, 2.0, 2.0, 3.0, 3.5, 3.5, 3.5])
    case = TextCase("repair", lambda text: [1], 7, frozenset({2}))
    speed, per_step = case.figures([Task([1], 7)], Answer(3.0, [record], 0, {}))
    assert speed.samples == [3 / 2.0] and per_step.samples == [3 / 2]


@pytest.mark.parametrize("case", ["text:poem", "text:edit:x", "text:edit:1", "text:edit:2:3", "text:"])
def test_what_there_is_not_is_refused_before_anything_starts(case: str) -> None:
    result = CliRunner().invoke(bench_app, ["model", "nowhere", "--case", case])
    assert isinstance(result.exception, ConfigError)
    assert f"The case {case!r} must be text:KIND" in str(result.exception) and "edit" in str(result.exception)


def test_both_engines_are_measured_on_the_same_prompts(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    engine = 'minivllm,enforce_eager=true,speculative_config={"method":"ngram"}'
    flags = ["--engine", engine, "--vs", "minivllm,enforce_eager=true", "--case", "text:story:24"]
    result = CliRunner().invoke(
        bench_app, ["model", str(tiny_model("llama")), *flags, "--repeats", "1", "--json", str(report)]
    )
    assert result.exit_code == 0, result.exception
    found = {
        entry["side"]: entry["samples"]
        for entry in json.loads(report.read_text())["measurements"]
        if entry["metric"] == "tokens per step"
    }
    assert found["minivllm,enforce_eager=true"] == [1.0] and found[engine][0] >= 1.0
