"""The sides of a comparison: what is asked for on the command line, and the processes that are asked in turn."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import minivllm
from minivllm.cli.bench.drive import Record, Task
from minivllm.cli.bench.side_process import MODULES
from minivllm.errors import ConfigError, ModelError

ENGINES = tuple(MODULES)
_PACKAGES = {
    "minivllm": ("minivllm", "minivllm"),
    "transformers": ("transformers", "transformers"),
    "transformers-cb": ("transformers", "transformers"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "vllm": ("vllm", "vllm"),
}
"""engine -> (what is imported, what is installed)."""

_WITHOUT_ARGUMENTS = ("transformers", "transformers-cb")
_CACHE_SIZES = {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"}


@dataclass(frozen=True)
class SideSpec:
    """An engine to measure. name: as it was asked for, arguments: those given with it. python: who runs it."""

    name: str
    engine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


@dataclass(frozen=True)
class Room:
    """What the requests of a benchmark need. longest: tokens of the longest one. running: requests at a time.

    tokens: of the ``running`` longest requests together.
    """

    longest: int
    running: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """One run of a side. counters: what the engine counted (see StepEngine.counters)."""

    seconds: float
    records: list[Record]
    peak_bytes: int
    counters: dict[str, float]


def parse_sides(texts: Iterable[str], llama_cpp_python: str | None = None) -> list[SideSpec]:
    """ "transformers,vllm" or "minivllm,enable_prefix_caching=false" -> engines with their arguments, in order.

    Commas separate engines; argument=value belongs to the engine before it. Raises ConfigError for an unknown engine,
    for one that is named twice, and for arguments where there can be none.
    """
    groups: list[list[str]] = []
    for text in texts:
        opened = False
        for part in text.split(","):
            if "=" in part and opened:
                groups[-1].append(part)
            else:
                groups.append([part])
                opened = True
    sides = [_side(engine, pairs, llama_cpp_python) for engine, *pairs in groups]
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        raise ConfigError(f"An engine is compared with itself in {', '.join(names)}: give it other settings.")
    return sides


def _side(engine: str, pairs: list[str], llama_cpp_python: str | None) -> SideSpec:
    if engine not in ENGINES:
        raise ConfigError(f"{engine!r} cannot be measured; known are: {', '.join(ENGINES)}.")
    if engine in _WITHOUT_ARGUMENTS and pairs:
        raise ConfigError(f"The {engine} side takes no further arguments, but {pairs[0]!r} was given.")
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    python = llama_cpp_python if engine == "llama.cpp" and llama_cpp_python is not None else sys.executable
    return SideSpec(",".join([engine, *pairs]), engine, arguments, python)


def check_installed(side: SideSpec) -> None:
    """Raises ConfigError with the remedy if the engine is not there."""
    module, package = _PACKAGES[side.engine]
    if side.python == sys.executable:
        if importlib.util.find_spec(module) is not None:
            return
        remedy = f"pip install {package}"
        if side.engine == "llama.cpp":
            remedy += ", or name a Python that has it with --llama-cpp-python"
        raise ConfigError(f"{side.engine} is not installed: {remedy}, or leave it out of --vs.")
    try:
        probe = subprocess.run([side.python, "-c", f"import {module}"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--llama-cpp-python {side.python} cannot be run: {error}.") from None
    if probe.returncode:
        raise ConfigError(
            f"{side.python} has no {module}: install {package} there, or name another Python with --llama-cpp-python."
        )


def complete(side: SideSpec, model: str, dtype: str, room: Room) -> SideSpec:
    """The side with what this benchmark needs filled in where the user said nothing. Raises ConfigError, ModelError."""
    given, sizes = side.arguments, {"longest": room.longest, "running": room.running}
    if side.engine == "llama.cpp":
        if dtype != "auto":
            raise ConfigError(
                f"--dtype {dtype} cannot hold for llama.cpp, which computes as its GGUF file is quantised."
            )
        default: dict[str, Any] = {"path": _gguf_path(model), "threads": _num_threads(), "gpu_layers": _gpu_layers()}
        return replace(side, arguments=default | given | sizes)
    if side.engine == "vllm":
        return replace(side, arguments={"model": model, "dtype": dtype, "max_model_len": room.longest + 64} | given)
    arguments: dict[str, Any] = {"model": model, "dtype": dtype} | given
    if side.engine in _WITHOUT_ARGUMENTS:
        arguments |= sizes
    if side.engine == "minivllm":
        arguments.setdefault("max_model_len", room.longest + 64)
        arguments.setdefault("max_num_seqs", max(room.running, 64))
        if not _CACHE_SIZES & set(arguments):
            arguments["num_gpu_blocks_override"] = steady_pool(room, arguments.get("block_size") or 64)
    return replace(side, arguments=arguments)


def steady_pool(room: Room, block_size: int) -> int:
    """Blocks for all running requests and the null block: warm-up touches all of them, and repetitions measure the
    steady state of a long-lived engine, not the operating system handing out memory. Twice, where that is not much:
    blocks of the run before then stay cached, as in a long-lived engine."""
    times = 2 if room.tokens <= 2**16 else 1
    return times * (-(-room.tokens // block_size) + 2 * room.running) + 1


def _gguf_path(model: str) -> str:
    from minivllm.models.fetch import resolve_model
    from minivllm.models.gguf_file import find_gguf

    path = find_gguf(resolve_model(model), "auto")
    if path is None:
        raise ConfigError(f"llama.cpp reads GGUF files only, and {model} is none: measure a .gguf file instead.")
    return str(path)


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _gpu_layers() -> int:
    """All layers on a GPU where our engine would use one too."""
    import torch

    return 999 if torch.cuda.is_available() else 0


class Side:
    """A running side process. Use as a context manager."""

    def __init__(self, spec: SideSpec) -> None:
        """Raises ConfigError if the engine is not installed, ModelError if it does not start."""
        check_installed(spec)
        self.name = spec.name
        package = str(Path(minivllm.__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH")
        self._process = subprocess.Popen(
            [spec.python, "-m", "minivllm.cli.bench.side_process", spec.engine, json.dumps(spec.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": package if not inherited else f"{package}{os.pathsep}{inherited}"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        self._messages: list[str] = []
        # A pipe that nobody reads fills up and stops the process.
        self._reader = threading.Thread(target=self._messages.extend, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        try:
            self.facts: dict[str, Any] = self._receive()["ready"]
        except BaseException:
            self._process.kill()
            raise

    def run(self, tasks: Sequence[Task]) -> Answer:
        """Run the tasks. Raises ModelError if the process ends instead."""
        try:
            print(json.dumps({"tasks": [asdict(task) for task in tasks]}), file=self._stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._receive()
        records = [Record(**record) for record in answer["records"]]
        return Answer(answer["seconds"], records, answer["peak_bytes"], answer["counters"])

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _receive(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> ModelError:
        self._process.wait()
        self._reader.join(timeout=5)
        last = next((text.strip() for text in reversed(self._messages) if text.strip()), "no message")
        return ModelError(f"{self.name} stopped: {last}")
