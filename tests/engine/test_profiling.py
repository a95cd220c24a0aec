"""``profile``: a trace holds the named ranges of every step, nested as they run; without it nothing is wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.engine_process.client import load_core
from minivllm.errors import ConfigError
from minivllm.profiling import trace_recorder as profiling

RANGES = ("schedule", "execute", "prepare", "first", "between", "last", "attention", "sample", "output")
NUM_LAYERS = 3


def traced(model: Path, directory: Path, max_tokens: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Greedy tokens, and the named ranges of the one trace that was written."""
    with LLM(
        str(model), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9, profile=str(directory)
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    [file] = directory.iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    return list(output.outputs[0].token_ids), [event for event in events if event.get("cat") == "user_annotation"]


def test_every_step_has_every_range_inside_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    _, events = traced(tiny_model("llama"), tmp_path / "new" / "traces", max_tokens=4)
    named = {name: [event for event in events if event["name"] == name] for name in ("step", *RANGES)}
    assert len(named["step"]) == 4
    for name in RANGES:
        times = {"between": NUM_LAYERS - 1, "attention": NUM_LAYERS}.get(name, 1)
        assert len(named[name]) == 4 * times, name
        for event in named[name]:
            around = [
                step
                for step in named["step"]
                if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
            ]
            assert len(around) == 1, f"{name} is not inside one step"


def test_a_trace_changes_no_token_and_ends_after_its_steps(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_STEPS", 2)
    tokens, events = traced(tiny_model("llama"), tmp_path, max_tokens=6)
    assert len(tokens) == 6
    assert sum(event["name"] == "step" for event in events) == 2
    with LLM(str(tiny_model("llama")), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == tokens


def test_without_a_profile_no_method_is_wrapped(tiny_model: Callable[..., Path]) -> None:
    args = EngineArgs(model=str(tiny_model("llama")), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9)
    core, _ = load_core(args)
    runner = core.executor.worker.runner  # type: ignore[attr-defined]
    for owner, methods in (
        (core, {"step"}),
        (core.scheduler, {"schedule", "update_from_output"}),
        (core.executor, {"execute_model"}),
        (runner, {"_sample"}),
        (runner.model, {"build"}),
        (runner.model.attention, {"attend"}),
    ):
        assert not methods & set(vars(owner)), owner
    core.shutdown()


def test_a_directory_that_cannot_be_made_is_told(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = EngineArgs(
        model=str(tiny_model("llama")),
        enforce_eager=True,
        max_model_len=64,
        num_gpu_blocks_override=9,
        profile=str(tmp_path / "file" / "traces"),
    )
    with pytest.raises(ConfigError, match="cannot be made"):
        load_core(args)
