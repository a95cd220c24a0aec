"""``minivllm bench startup``: from nothing to the first token, without compiled code on disk and with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import minivllm
from minivllm.bench.reports.report import Measurement, OutputOptions, make_report, publish
from minivllm.cli.engine.engine_start import fetch_model
from minivllm.cli.engine.options import engine_flags, with_options
from minivllm.config import EngineArgs
from minivllm.errors import ModelError

CHAT = "chat, first output"
TIMEOUT = 1800


@with_options
def startup(
    args: EngineArgs,
    output: OutputOptions,
    repeats: Annotated[int, typer.Option(min=1, help="Cold and warm starts to measure.")] = 3,
    chat: Annotated[
        bool, typer.Option("--chat", help="Also measure `minivllm chat -p hi` up to its first output.")
    ] = False,
) -> None:
    """Measure import, load, compile, capture and first token in fresh processes.

    Cold: the directory of compiled code is new. Warm: it is the one that the cold start filled, not yours.

    Example: minivllm bench startup --chat
    """
    fetch_model(args)
    given = {name: value for name, value in asdict(args).items() if value is not None}
    given = {"compile_in_background": False} | given  # so that compilation is a part of the start
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for name, seconds in cold_and_warm(partial(start_engine, given)):
            for part, value in seconds.items():
                samples.setdefault((name, part), []).append(value)
        if chat:
            flags = [args.model, *engine_flags(args)]
            finish = partial(start_chat, [*flags, "--no-compile-in-background"])
            for name, seconds in cold_and_warm(partial(start_chat, flags), finish):
                samples.setdefault((name, CHAT), []).append(seconds[CHAT])
    measurements = [
        Measurement(case=case, side="minivllm", metric=part, unit="s", better="lower", samples=values)
        for (case, part), values in sorted(samples.items(), key=lambda item: item[0][0])
    ]
    publish(make_report("startup", {"model": args.model, "engine": given}, measurements), output)


def cold_and_warm(
    start: Callable[[Mapping[str, str]], dict[str, float]],
    finish: Callable[[Mapping[str, str]], Any] | None = None,
) -> list[tuple[str, dict[str, float]]]:
    """One start with a new directory for compiled code, and one with what that left there. Raises ModelError.

    finish: compiles between them what the first start went on compiling, or left.
    """
    with tempfile.TemporaryDirectory(prefix="minivllm-startup-") as directory:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(directory) / "inductor"),
            "PYTHONPATH": os.pathsep.join(
                [str(Path(minivllm.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        cold = start(environment)
        if finish is not None:
            finish(environment)
        return [("cold", cold), ("warm", start(environment))]


def start_engine(arguments: dict[str, Any], environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of every part of one start, in a process of its own. Raises ModelError."""
    command = [
        sys.executable,
        "-m",
        "minivllm.bench.parts.startup_process",
        json.dumps(arguments),
        repr(time.time()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
    if done.returncode:
        raise ModelError(
            f"The engine did not start: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def start_chat(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds until ``minivllm chat -p hi`` shows something of its answer.
    arguments: the model and engine flags.

    Raises ModelError.
    """
    command = [sys.executable, "-m", "minivllm.cli.main", "chat", *arguments, "-p", "hi"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--temperature", "0", "--max-tokens", "8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - started
    _, errors = process.communicate(timeout=TIMEOUT)
    if process.returncode or not first:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"minivllm chat did not answer: {last}")
    return {CHAT: seconds}
