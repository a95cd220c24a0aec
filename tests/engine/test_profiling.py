"""``profile``: a trace holds the spans of every step, nested as they run, whatever regions compute it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.bench.parts.parts import timed_spans
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Region
from minivllm.engine_process.client import load_core
from minivllm.errors import ConfigError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.profiling import spans
from minivllm.profiling import trace_recorder as profiling
from minivllm.profiling.spans import span

RANGES = (
    "schedule",
    "dispatch",
    "execute",
    "apply",
    "prepare",
    "wait",
    "first",
    "between",
    "last",
    "attention",
    "sample",
    "output",
)
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
    return list(output.outputs[0].token_ids), [
        event for event in events if event.get("cat") == "user_annotation"
    ]


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
    with LLM(
        str(tiny_model("llama")), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == tokens


def test_a_recorder_listens_until_its_trace_is_written(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_STEPS", 2)
    traced(tiny_model("llama"), tmp_path, max_tokens=6)
    assert spans._listening == ()


def test_only_the_steps_of_its_own_core_count(tmp_path: Path) -> None:
    core = object()
    recorder = profiling.TraceRecorder(str(tmp_path), core)
    with span("step", object()), span("schedule"):
        pass
    recorder.stop()
    assert list(tmp_path.iterdir()) == [], "no step of this core ran"
    assert spans._listening == ()


def test_ranges_stay_when_other_regions_take_over(tiny_model: Callable[..., Path]) -> None:
    """What a chat does whose model has been compiled meanwhile."""
    replaced: list[str] = []

    class Replacing(RegionCompiler):
        def __call__(self, region: Region) -> Callable:
            def run(*arguments: Any) -> Any:
                replaced.append(region.name)
                return region.function(*arguments)

            return run

    names = ("first", "between", "last", "attention", "prepare", "sample")
    args = EngineArgs(
        model=str(tiny_model("llama")), enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9
    )
    with LLMEngine.from_args(args) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, params)
        heard = []
        core = engine.client.core  # type: ignore[attr-defined]
        for takes_over in (False, True):
            if takes_over:
                core.executor.worker.runner.use_regions(Replacing(enabled=False))
            with timed_spans(*names) as seconds:
                engine.step()
            heard.append({name: len(seconds[name]) for name in names})
    once = dict.fromkeys(names, 1)
    assert heard == [once | {"between": NUM_LAYERS - 1, "attention": NUM_LAYERS}] * 2
    assert [name for name in replaced if name in names] == ["first", *["between"] * (NUM_LAYERS - 1), "last"]


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
