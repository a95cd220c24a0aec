"""The model in the form that a peer reads: a Hugging Face directory, or an export of it for OpenVINO; made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, ModelError
from minivllm.gguf.gguf_file import find_gguf
from minivllm.hub.fetch import model_cache, resolve_model

OPENVINO_WEIGHTS: dict[str, list[str]] = {
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
    "int8": ["--weight-format", "int8"],
    "fp16": ["--weight-format", "fp16"],
    "bf16": ["--weight-format", "bf16"],
    "fp32": ["--weight-format", "fp32"],
}
"""How weights are kept -> flags of ``optimum-cli export openvino``; 4 bits in groups of 32, as in GGUF files."""


def gguf_path(model: str) -> str:
    """Raises ConfigError if the model is no GGUF file, ModelError if there is none."""
    path = find_gguf(resolve_model(model), "auto")
    if path is None:
        raise ConfigError(f"llama.cpp reads GGUF files only, and {model} is none: measure a .gguf file instead.")
    return str(path)


def hf_directory(model: str) -> Path:
    """The model's own directory, or for a GGUF file one with its weights dequantised to float32.

    Raises ModelError.
    """
    found = resolve_model(model)
    source = find_gguf(found, "auto")
    return found if source is None else _made_once(source, "hf-float32", lambda target: _dequantise(source, target))


def openvino_directory(model: str, weights: str, python: str) -> Path:
    """The model exported by the ``optimum-cli`` beside ``python``. Raises ConfigError or ModelError."""
    if weights not in OPENVINO_WEIGHTS:
        raise ConfigError(f"weights is {weights!r}, but openvino's must be one of: {', '.join(OPENVINO_WEIGHTS)}.")
    source = hf_directory(model)

    def export(target: Path) -> None:
        program = Path(python).with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        command = [str(program), "export", "openvino", "--model", str(source), *task, *OPENVINO_WEIGHTS[weights]]
        try:
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run([*command, str(target)], capture_output=True, text=True, check=True, env=own)
        except OSError as error:
            raise ConfigError(f"{program} cannot be run: {error}. Install optimum-intel beside OpenVINO.") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(f"optimum-cli did not export {model}: {last}") from None

    return _made_once(source, f"openvino-{weights}", export)


def _made_once(source: Path, form: str, make: Callable[[Path], None]) -> Path:
    """The directory that ``make`` filled for this source, now or earlier; another source has another directory."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    content = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    target = model_cache().parent / "bench" / f"{source.stem}-{form}-{digest}"
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

    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    content = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    (target / "config.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
