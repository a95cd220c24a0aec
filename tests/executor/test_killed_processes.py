"""Kill -9 of each process of an engine with two workers, in every phase:
who waits hears of it, nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import ERROR_SECONDS, spare_seconds

PHASES = ("start", "load", "warm-up", "prefill", "decode", "idle", "shutdown")
VICTIMS = ("frontend", "engine", "worker 0", "worker 1")
QUICK = {("worker 1", "decode"), ("engine", "prefill")}


def is_victim(process: psutil.Process, victim: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    if victim == "engine":
        return "minivllm.engine_process.process" in command
    return "minivllm.executor.worker_process" in command and command[-2] == victim[-1]


def messages(program: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert program.stdout is not None
    for line in program.stdout:
        yield json.loads(line)


def family_of(program: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(program.pid).children(recursive=True)


def find(program: subprocess.Popen[str], victim: str) -> psutil.Process:
    """The process to be killed, which may be about to be started."""
    if victim == "frontend":
        return psutil.Process(program.pid)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in family_of(program):
            if is_victim(process, victim):
                return process
        assert program.poll() is None
    raise AssertionError(f"there is no {victim}")


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        pytest.param(victim, phase, marks=[] if (victim, phase) in QUICK else [pytest.mark.slow])
        for phase in PHASES
        for victim in VICTIMS
    ],
)
def test_everybody_hears_of_a_kill_and_nothing_is_left(
    tiny_model: Callable[..., Path], victim: str, phase: str
) -> None:
    directory = tempfile.mkdtemp(prefix="killed-", dir="/tmp")  # a short path, for sockets
    arguments = {
        "model": str(tiny_model("llama", num_hidden_layers=2)),
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "max_num_batched_tokens": 8,
        "num_gpu_blocks_override": 200,
        "block_size": 8,
        "tensor_parallel_size": 2,
        "logits_processors": ["tests.executor.frontend_program:Phased"],
    }
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.executor.frontend_program", json.dumps(arguments), phase],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": directory},
    )
    told = messages(program)
    assert any(message.get("phase") == phase for message in told)
    if phase == "start" and victim == "frontend":
        find(program, "worker 0")
    process = find(program, victim)
    family = family_of(program)
    process.kill()
    killed = time.monotonic()
    rest = list(told)
    errors = [(message["error"], message["time"] - killed) for message in rest if "error" in message]
    status = program.wait(30)
    _, left = psutil.wait_procs(
        family, timeout=10 + spare_seconds()
    )  # an engine may finish what it does for 3 s
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    print(f"{victim}, {phase}: {[round(seconds, 2) for _, seconds in errors]}")
    try:
        assert left == []
        if victim == "frontend":
            assert status == -signal.SIGKILL and errors == []
        else:
            assert status == 0
            assert len(errors) == {"prefill": 4, "decode": 4, "shutdown": 0}.get(phase, 1)
            who = "engine process" if victim == "engine" else f"worker of rank {victim[-1]}"
            assert all(f"The {who} was killed by SIGKILL" in error for error, _ in errors), errors
            assert all(seconds < ERROR_SECONDS + spare_seconds() for _, seconds in errors), errors
        deadline = time.monotonic() + 5 + spare_seconds()
        while os.listdir(directory) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert os.listdir(directory) == []
    finally:
        shutil.rmtree(directory)
