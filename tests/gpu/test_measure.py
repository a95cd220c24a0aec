"""The steps for a GPU themselves, on a CPU and tiny sizes: figures that mean nothing, in the right places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.compilation.compiler import cannot_compile_reason
from tests.gpu import run_steps
from tests.gpu.run_steps import STEPS, Step, run_step

REASON = cannot_compile_reason(torch.device("cpu"))


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [
        sys.executable,
        str(Path(run_steps.__file__)),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(folder),
    ]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert result.returncode == int(any(step["status"] != "ok" for step in found.values())), result.stderr
    return found


def test_the_limits_leave_room_for_what_matters_most() -> None:
    until_checks = [step.limit for step in STEPS[: [step.name for step in STEPS].index("checks") + 1]]
    assert sum(until_checks) < run_steps.BUDGET_SECONDS <= 25 * 60


def test_checks_are_all_files_that_need_a_gpu() -> None:
    [step] = [step for step in STEPS if step.is_check]
    command = run_steps.command_of(step, "cuda", False, Path("unused"))
    of_a_gpu = [path for path in run_steps.HERE.glob("test_*.py") if "\npytestmark" in path.read_text()]
    assert set(run_steps.CHECKS) == set(of_a_gpu)
    assert command[-len(run_steps.CHECKS) :] == [str(path) for path in run_steps.CHECKS]


def test_a_step_that_fails_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    scripts = {
        "failing": "raise SystemExit(3)",
        "hanging": "import time; time.sleep(60)",
        "good": f"open({str(out)!r}, 'w').write('[1]')",
    }
    with (tmp_path / "log.txt").open("w") as log:
        found = {
            name: run_step(Step(name, 1), [sys.executable, "-c", script], out, 3.0, log)
            for name, script in scripts.items()
        }
    assert found["failing"]["status"] == "failed with exit status 3"
    assert found["hanging"]["status"] == "stopped after 3 s"
    assert found["good"]["status"] == "ok" and found["good"]["figures"] == [1]


@pytest.mark.slow
def test_every_step_writes_its_figures(tmp_path: Path) -> None:
    names = "environment,copy_bandwidth,llama_8b,nano_256,graphs,quantized,kv_dtypes,speculation"
    found = run(tmp_path, "--only", names)
    assert [step["status"] for step in found.values()] == ["ok"] * 8, found
    figures = {name: step["figures"] for name, step in found.items()}
    assert figures["environment"]["versions"]["torch"] == torch.__version__
    assert figures["copy_bandwidth"]["gb_per_second"] > 0
    assert figures["graphs"]["eager"]["batch_1"]["step_milliseconds"] > 0
    assert "error" not in figures["quantized"]["none"]
    assert figures["llama_8b"]["recompilations"] == figures["nano_256"]["recompilations"] == 0
    assert figures["llama_8b"]["decode_batch_4"]["tokens_per_second"] > 0
    assert figures["llama_8b"]["prefill"]["share_of_matmul_peak"] > 0
    assert figures["nano_256"]["output_tokens"] > 0
    assert (
        figures["kv_dtypes"]["bfloat16"]["kv_cache_blocks"]
        == 2 * figures["kv_dtypes"]["float32"]["kv_cache_blocks"]
    )
    assert figures["speculation"]["tokens_in_common"] == 1.0
    assert figures["speculation"]["ngram"]["steps"] <= figures["speculation"]["none"]["steps"]


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_decode_attention_is_measured(tmp_path: Path) -> None:
    [step] = run(tmp_path, "--only", "decode_attention").values()
    assert step["status"] == "ok", step
    assert all(case["largest_error"] < 1e-5 and case["gb_per_second"] > 0 for case in step["figures"])
