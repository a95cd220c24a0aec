"""Runs the checks and the measurements of a CUDA device, each in a process of its own with a limit of time.

``python tests/gpu/run_steps.py`` on a CUDA device; ``--device cpu --tiny`` tries every measurement on a CPU.
A step that fails, hangs or is killed costs only itself. ``results.json`` holds everything so far after every
step, ``log.txt`` what the steps printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
BUDGET_SECONDS = 1500.0
LEAST_SECONDS = 10.0
"""With less than this left a step is not started."""


@dataclass(frozen=True)
class Step:
    """limit: seconds. is_check: tests, in place of a measurement of measure.py by the step's name."""

    name: str
    limit: float
    is_check: bool = False


# What matters most comes first: what does not fit into the budget is left out. Most of the time is compiling:
# with an H100 and 16 cores the checks take five minutes, and the start of an engine that finds nothing
# compiled takes one.
STEPS = (
    Step("environment", 40),
    Step("copy_bandwidth", 30),
    Step("llama_8b", 180),
    Step("nano_256", 150),
    Step("checks", 600, is_check=True),
    Step("decode_attention", 120),
    Step("quantized", 300),
    Step("kv_dtypes", 240),
    Step("graphs", 360),
    Step("speculation", 180),
)
CHECKS = sorted(HERE.glob("test_cuda_*.py"))


def command_of(step: Step, device: str, tiny: bool, out: Path) -> list[str]:
    if step.is_check:
        # No plugins and no project settings: only pytest itself may be there.
        flags = ["-c", os.devnull, f"--rootdir={HERE}", "--noconftest", "-rs", "-q", "-W", "ignore"]
        if importlib.util.find_spec("xdist") is not None:  # most of their time is compiling
            flags += ["-p", "xdist", "-n", str(min(15, os.cpu_count() or 1))]
        return [sys.executable, "-m", "pytest", *flags, *map(str, CHECKS)]
    flags = ["--device", device, *(["--tiny"] if tiny else []), "--out", str(out)]
    return [sys.executable, str(HERE / "measure.py"), step.name, *flags]


def run_step(step: Step, command: list[str], out: Path, seconds: float, log: IO[str]) -> dict[str, Any]:
    """Run one step for at most so many seconds; its status, the seconds it took and what it found."""
    print(f"\n==== {step.name}", file=log, flush=True)
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if step.is_check:  # many at once
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=HERE.parents[1],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=seconds)
        status = "ok" if code == 0 else f"failed with exit status {code}"
    except subprocess.TimeoutExpired:
        # Its children too: compilers that would go on.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = f"stopped after {seconds:.0f} s"
    found: dict[str, Any] = {"status": status, "seconds": round(time.perf_counter() - began, 1)}
    if out.is_file():
        found["figures"] = json.loads(out.read_text())
    return found


def last_lines(path: Path, count: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-count:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check the steps")
    parser.add_argument("--only", help="steps to run, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for everything together")
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: $OUT or tests/gpu/results)"
    )
    arguments = parser.parse_args()
    wanted = [step.name for step in STEPS] if arguments.only is None else arguments.only.split(",")
    if unknown := set(wanted) - {step.name for step in STEPS}:
        parser.error(
            f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}"
        )
    folder = arguments.out or Path(os.environ.get("OUT") or HERE / "results")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, (folder / "log.txt").open("w", encoding="utf-8") as log:
        for step in STEPS:
            if step.name not in wanted:
                continue
            left = arguments.seconds - (time.perf_counter() - began)
            if left < LEAST_SECONDS:
                results[step.name] = {"status": "not started: no time was left"}
            else:
                out = Path(scratch) / f"{step.name}.json"
                command = command_of(step, arguments.device, arguments.tiny, out)
                results[step.name] = run_step(step, command, out, min(step.limit, left), log)
            if results[step.name]["status"] != "ok":
                results[step.name]["last_lines"] = last_lines(folder / "log.txt", 15)
            print(step.name, json.dumps(results[step.name])[:1500], flush=True)
            (folder / "results.json").write_text(json.dumps(results, indent=2))
    print(f"Took {time.perf_counter() - began:.0f} s; results in {folder}")
    return int(any(found["status"] != "ok" for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
