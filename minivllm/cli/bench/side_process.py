"""One side of a comparison: a process that loads an engine and runs what it is told.

It reads one JSON object per line, ``{"tasks": [{"prompt", "max_tokens", "arrival", "after"}]}``, and answers
``{"seconds", "records", "peak_bytes", "counters"}``. Its first line is ``{"ready": {facts}}``. What the engine prints
goes to standard error.

    python -m minivllm.cli.bench.side_process minivllm '{"model": "smollm2"}'
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from dataclasses import asdict
from typing import Any

from minivllm.cli.bench.drive import StepEngine, Task, drive
from minivllm.errors import MinivllmError

MODULES = {
    "minivllm": "minivllm.cli.bench.side_minivllm",
    "transformers": "minivllm.cli.bench.side_transformers",
    "transformers-cb": "minivllm.cli.bench.side_transformers_cb",
    "llama.cpp": "minivllm.cli.bench.side_llama_cpp",
    "vllm": "minivllm.cli.bench.side_vllm",
}
"""Where the engines are; each module has ``load(arguments) -> StepEngine``."""


def peak_memory_bytes() -> int:
    """The most memory this process held: on the accelerator if it used one, else in main memory."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0:
        return int(torch.cuda.max_memory_reserved())
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Serve one side on standard input and output until the input ends."""
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    # Native libraries print to the descriptor, not to sys.stdout; both must stay out of the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine: StepEngine = importlib.import_module(MODULES[name]).load(arguments)
    except MinivllmError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(json.dumps({"ready": engine.facts}), file=answers, flush=True)
    for line in sys.stdin:
        tasks = [Task(**task) for task in json.loads(line)["tasks"]]
        engine.reset()
        records, seconds = drive(engine, tasks)
        answer = {
            "seconds": seconds,
            "records": [asdict(record) for record in records],
            "peak_bytes": peak_memory_bytes(),
            "counters": engine.counters(),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
