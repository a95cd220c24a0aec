"""The checks of a CUDA device, run to their end on a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SECONDS = 540


def run(path: Path, num_gpus: int = 1, *arguments: str) -> None:
    """All tests of a file must pass, and none may be skipped for want of a GPU."""
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
    environment = {**os.environ, "PRETENDED_GPUS": str(num_gpus)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=TESTS.parent,
    )
    assert result.returncode == 0 and "PASSED" in result.stdout, (
        result.stdout[-20_000:] + result.stderr[-5_000:]
    )
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert not [line for line in skipped if "CUDA" in line], skipped


def test_the_pretended_gpu_refuses_what_cuda_refuses() -> None:
    run(Path(__file__).with_name("device_checks.py"))


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", sorted(path.stem for path in (TESTS / "gpu").glob("test_cuda_*.py")))
def test_checks_of_a_gpu_pass_on_the_pretended_one(name: str) -> None:
    run(TESTS / "gpu" / f"{name}.py")


@pytest.mark.timeout(SECONDS + 60)
def test_workers_with_a_gpu_each_exchange_through_nccl() -> None:
    """Of which gloo takes the place: captured in graphs, and replayed."""
    run(TESTS / "gpu" / "test_cuda_workers.py", 2, "-k", "tensor or experts")
