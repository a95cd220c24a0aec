"""Compilation in the background:
when workers change over, what is logged meanwhile, and where it is the default."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.package_keys import hash_of
from minivllm.compilation.packaged.package_builds import can_fork
from minivllm.compilation.packaged.shared_parts import SharedParts
from minivllm.config import EngineArgs
from minivllm.engine import background_builds
from minivllm.engine.background_builds import BackgroundBuilds, progress_line
from minivllm.engine.resolve import resolve_background


class Workers:
    """Two workers as an executor's ``collective`` reaches them.
    built: (of the first, of the second), of 3 each."""

    def __init__(self, *built: int, can_build: bool = True) -> None:
        self.built, self.is_building, self.can_build = list(built), True, can_build
        self.calls: list[str] = []

    def __call__(self, method: str) -> list[Any]:
        if method == "build_progress":
            return [(built, 3, self.is_building) for built in self.built]
        self.calls.append(method)
        return [self.can_build for _ in self.built]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(background_builds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_workers_change_over_together_once_the_last_one_has_everything(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers(1, 0)
    builds = BackgroundBuilds(workers)
    assert workers.calls == ["serve_uncompiled"] and not builds.are_done
    assert "in the background, 5 of 6 regions" in caplog.text, (
        "a warning is seen without any set-up of logging"
    )
    for built in ([3, 0], [3, 2]):
        workers.built, clock[0] = built, clock[0] + 1
        builds.poll()
        assert workers.calls == ["serve_uncompiled"]
    workers.built = [3, 3]
    builds.poll()
    assert not builds.are_done, "two looks are half a second apart, for each waits for the steps in flight"
    clock[0] += 1
    builds.poll()
    assert workers.calls == ["serve_uncompiled", "change_over"] and builds.are_done


@pytest.mark.parametrize(
    "workers", [Workers(3, 3), Workers(0, 3, can_build=False)], ids=["on disk", "cannot fork"]
)
def test_what_need_not_or_cannot_be_built_in_the_background_is_compiled_at_the_start(
    workers: Workers,
) -> None:
    assert BackgroundBuilds(workers).are_done
    assert workers.calls[-1] == "change_over"


def test_a_build_that_ended_early_leaves_answers_uncompiled_and_says_so(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers(0, 0)
    builds = BackgroundBuilds(workers)
    workers.built, workers.is_building = [3, 1], False
    clock[0] += 1
    builds.poll()
    assert builds.are_done and workers.calls == ["serve_uncompiled"]
    assert "2 of 6 regions could not be compiled" in caplog.text and "--wait-for-compilation" in caplog.text


def test_progress_is_logged_with_an_estimate(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="minivllm")
    workers = Workers(0, 0)
    builds = BackgroundBuilds(workers)
    workers.built, clock[0] = [1, 1], clock[0] + 30
    builds.poll()
    builds.poll()
    assert caplog.text.count("2 of 6 regions after 30 s, about 60 s left.") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((2, 12, 2, 20.0), "Compiling in the background: 2 of 12 regions after 20 s."),
        ((4, 12, 2, 20.0), "Compiling in the background: 4 of 12 regions after 20 s, about 80 s left."),
        ((3, 12, 2, 20.0), "Compiling in the background: 3 of 12 regions after 20 s, about 3 minutes left."),
    ],
)
def test_the_estimate_counts_what_this_start_has_built(
    arguments: tuple[int, int, int, float], line: str
) -> None:
    assert progress_line(*arguments) == line


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cpu", True),
        ({"compile_in_background": False}, "cpu", False),
        ({}, "cuda", False),
        ({"enforce_eager": True}, "cpu", False),
        ({"speculative_config": {"method": "ngram"}}, "cpu", False),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "cpu", False),
        ({"tensor_parallel_size": 2}, "cpu", True),
        ({"distributed_executor_backend": "external_launcher"}, "cpu", False),
    ],
)
def test_it_is_the_default_of_every_frontend_on_a_cpu(
    given: dict[str, Any], device: str, expected: bool
) -> None:
    assert resolve_background(EngineArgs(model="m", **given), device) is expected


PROGRAM = """
import sys
from pathlib import Path
from minivllm import LLM, SamplingParams
model, home = sys.argv[1], Path(sys.argv[2])
if __name__ == "__main__":
    settings = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 24, "max_model_len": 64}
    llm = LLM(model, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
    assert not list(home.rglob("*.pt2")), "an answer came before anything was compiled"
    print(output.outputs[0].token_ids, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_fork(), reason="builds are child processes on Linux only")
@pytest.mark.skipif(cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_a_script_answers_before_anything_is_compiled_and_its_end_ends_the_compilers(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    script, home = tmp_path / "script.py", tmp_path / "home"
    script.write_text(PROGRAM)
    environment = {**os.environ, "MINIVLLM_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, str(script), str(tiny_model("llama")), str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr
    assert "in the background" in done.stderr, "a person is told"
    deadline = time.monotonic() + 30
    while left := processes_of(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    with SharedParts(home / "regions"):
        pass
    for package in (home / "regions").iterdir():
        if package.suffix == ".pt2":
            assert package.stem.rpartition("-")[2] == hash_of(package.read_bytes())
        assert package.suffix in (".pt2", ".lock"), "what was half-written is deleted by the next build"


def processes_of(home: Path) -> list[str]:
    """Command lines of processes that have this MINIVLLM_HOME."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MINIVLLM_HOME") == str(home):
                found.append(" ".join(process.cmdline()))
    return found
