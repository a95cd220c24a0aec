"""One side of a comparison: a process that loads an engine and runs what it is told.

It reads one JSON object per line, ``{"tasks": [{"prompt", "max_tokens", "arrival", "after"}], "own_way":
false}``, and answers ``{"seconds", "records", "peak_bytes", "counters"}``; with own_way the engine runs the
tasks its own documented way, which tells no more than the seconds. ``{"text": [ids]}`` it answers with
``{"log_probabilities": […]}``, of every token but the first. Its first line is ``{"ready": {facts}}``. Output
of the engine goes to
standard error. A peer's Python needs nothing of what this package depends on.

    python -m minivllm.bench.sides.side_process minivllm '{"model": "smollm2"}'
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import IO, Any

from minivllm.bench.sides.drive import Answer, Record, Task, drive
from minivllm.errors import MinivllmError

LOADERS = {
    "minivllm": ("side_minivllm", "load"),
    "transformers": ("peers", "load_transformers"),
    "transformers-cb": ("peers", "load_continuous"),
    "llama.cpp": ("peers", "load_llama_cpp"),
    "vllm": ("peers", "load_vllm"),
    "openvino": ("peers", "load_openvino"),
}
"""engine -> the module of this package and the function of it that makes a StepEngine of the side's
arguments."""

SECONDS_TO_END = 20


def peak_memory_bytes() -> int:
    """The most memory this process held: on the accelerator if it used one, else in main memory. There, the
    peaks of all processes that it has started and that still run are added: engines have workers.

    Memory that several of them share is counted for each.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0:
        return int(torch.cuda.max_memory_reserved())
    own = _peak_of(os.getpid()) or _peak_since_fork()
    return own + sum(map(_peak_of, _descendants(os.getpid())))


def _peak_since_fork() -> int:
    """Where there is no /proc. It is never less than what the process held that forked this one."""
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _descendants(process: int) -> list[int]:
    """Processes that this one has started, and those have. None where there is no /proc."""
    children: dict[int, list[int]] = {}
    for status in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(status) as file:  # it may have ended
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.split("/")[2]))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _peak_of(process: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _end_with_parent() -> None:
    """When the parent has gone, end this process and its children, which may be loading or compiling."""
    inputs = select.poll()
    inputs.register(0, 0)  # hang-ups are told anyway
    inputs.poll()
    time.sleep(SECONDS_TO_END)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve one side on standard input and output until the input ends."""
    if os.getpgrp() == os.getpid():  # as ``Side`` starts it
        # The kernel hangs up a sleeping group that lost its parent; under nohup that would be ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, daemon=True).start()
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    # Native libraries print to the descriptor, not to sys.stdout; both must stay out of the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        module, load = LOADERS[name]
        _serve(getattr(importlib.import_module(f"minivllm.bench.sides.{module}"), load)(arguments), answers)
    except MinivllmError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _serve(engine: Any, answers: IO[str]) -> None:
    """Say that the engine is there, and answer what is asked until the input ends."""
    print(json.dumps({"ready": engine.facts}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "text" in asked:
            found = engine.log_probabilities(asked["text"])
            print(json.dumps({"log_probabilities": found}), file=answers, flush=True)
            continue
        tasks = [Task(**task) for task in asked["tasks"]]
        engine.reset()
        records: list[Record] = []
        if asked["own_way"]:
            start = time.perf_counter()
            engine.own_way(tasks)
            seconds = time.perf_counter() - start
        else:
            records, seconds = drive(engine, tasks)
        answer = Answer(seconds, records, peak_memory_bytes(), engine.counters())
        print(json.dumps(asdict(answer)), file=answers, flush=True)


if __name__ == "__main__":
    main()
