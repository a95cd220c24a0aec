"""The checks of a CUDA device, run to their end on a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SECONDS = 540


def faults_of(path: Path, num_gpus: int = 1, *arguments: str) -> list[str]:
    """What does not pass of the tests of a file, or is skipped for want of a GPU."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.pretended_gpu.plugin",
        "-n0",
        "-rA",
        "-W",
        "ignore",
    ]
    environment = {**os.environ, "PRETENDED_GPUS": str(num_gpus), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=TESTS.parent,
    )
    lines = result.stdout.splitlines()
    skipped = [line for line in lines if line.startswith("SKIPPED") and "CUDA" in line]
    if result.returncode == 0 and any(line.startswith("PASSED") for line in lines):
        return skipped
    return [*skipped, result.stdout[-20_000:], result.stderr[-5_000:]]


def test_the_pretended_gpu_refuses_what_cuda_refuses() -> None:
    assert faults_of(Path(__file__).with_name("device_checks.py")) == []


CHECKS = sorted(path.stem for path in (TESTS / "gpu").glob("test_cuda_*.py"))


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "test_cuda_workers"])
def test_checks_of_a_gpu_pass_on_the_pretended_one(name: str) -> None:
    assert faults_of(TESTS / "gpu" / f"{name}.py") == []


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("num_gpus", "chosen"),
    [
        (1, "tp2-piecewise or pp2-drafts"),
        (2, "tp2-dp2 or experts"),
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(2, "", marks=pytest.mark.slow),
    ],
)
def test_workers_with_a_gpu_each_or_one_for_both_give_the_tokens_of_one(num_gpus: int, chosen: str) -> None:
    """With a GPU each they exchange through NCCL, of which gloo takes the place, in graphs too."""
    assert faults_of(TESTS / "gpu" / "test_cuda_workers.py", num_gpus, "-k", chosen) == []


@pytest.mark.timeout(300)
def test_measurements_of_a_gpu_run_to_their_end_on_the_pretended_one(tmp_path: Path) -> None:
    """Their times say nothing; that every step writes its figures does. Without llama_8b, whose profiler wants a
    real device."""
    steps = "environment,copy_bandwidth,nano_256,decode_attention,graphs,speculation"
    command = [sys.executable, str(TESTS / "gpu" / "run_steps.py"), "--tiny", "--only", steps]
    paths = [str(Path(__file__).parent / "startup"), str(TESTS.parent)]
    result = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = json.loads((tmp_path / "results.json").read_text())
    assert result.returncode == 0, found
    assert list(found) == steps.split(",") and '"error"' not in json.dumps(found)
