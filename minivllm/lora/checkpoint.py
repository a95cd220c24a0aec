"""Read a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

Everything is checked before anything is handed out, and what would change the answer if it were left out
(trained embeddings, DoRA magnitudes, biases, …) is refused by name. Pickled adapters are never opened.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.checkpoints.checkpoint import FLOAT_TYPES, Shape
from minivllm.checkpoints.hf_config import read_json_object
from minivllm.errors import ModelError, RequestError
from minivllm.stop_conditions.name_pattern import NamePattern, name_pattern

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
_EMBEDDING_MODULES = ("embed_tokens", "lm_head")

# Options of PEFT's LoraConfig that change what the adapter computes and have no counterpart here:
# each with what it is.
_REFUSED_OPTIONS = {
    "use_dora": "magnitude vectors (DoRA)",
    "modules_to_save": "whole trained modules",
    "lora_bias": "biases of its own",
    "layer_replication": "repeated layers",
    "target_parameters": "single trained parameters",
    "trainable_token_indices": "trained embeddings",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "alora_invocation_tokens": "activation by certain tokens (aLoRA)",
}
# Ways of initialising that change the base model's weights besides:
# the adapter alone does not hold the difference.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class LowRank(NamedTuple):
    """The update of one weight: B @ A. a [rank, in]; b [out, rank], scaling included."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """One adapter in host memory.

    digest: SHA-256 over both files; adapters that compute the same thing share it. rank: the highest of any
    layer. modules: by name of the linear layer, such as ``model.layers.0.self_attn.q_proj``, whole matrices
    in the dtype of the model.
    """

    digest: str
    rank: int
    modules: dict[str, LowRank]


RowsOfLayers = Callable[[str], Mapping[str, Tensor]]
"""Module of a published checkpoint -> the linear layers that it holds,
and which of its outputs are theirs, int64."""


def load_adapter(
    path: str,
    expected: Mapping[str, Shape],
    max_rank: int,
    dtype: torch.dtype,
    pin_memory: bool = False,
    rows_of_layers: RowsOfLayers | None = None,
) -> Adapter:
    """Read and check an adapter.

    expected: shape [out, in] of every linear layer an adapter may change, by name. max_rank: the largest rank
    there is room for. dtype: of the returned matrices. pin_memory: page-locked, so that copies to a GPU
    overlap with its work. rows_of_layers: where the model's layers are not the modules that adapters name;
    those that are stored as one module share its A, and have their rows of its B.
    Raises RequestError, a sentence that names the adapter's directory and what is wrong with it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise RequestError(
            f"The adapter's path is {path!r}, but must be a local directory with {CONFIG_NAME}."
        )
    config, weights = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    try:
        options = _Options(config, read_json_object(config))
    except ModelError as error:
        raise RequestError(f"Not an adapter: {error}") from None
    if not weights.is_file():
        pickled = (
            " (adapter_model.bin could run any code and is never opened; save the adapter as safetensors)"
        )
        hint = pickled if (directory / "adapter_model.bin").is_file() else ""
        raise RequestError(f"The adapter in {directory} has no {WEIGHTS_NAME}{hint}.")
    try:
        digest = hashlib.sha256(config.read_bytes())
        with weights.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        found = rows_of_layers or (
            lambda name: {name: torch.arange(expected[name][0])} if name in expected else {}
        )
        layers, matrices = _read_matrices(weights, expected, max_rank, found)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{weights} is not a valid safetensors file ({error}); it may be truncated."
        ) from None
    modules: dict[str, LowRank] = {}
    for name, (a, b) in matrices.items():
        scaled = LowRank(a.to(dtype), (b.double() * options.scaling(name, a.shape[0])).to(dtype))
        if not (scaled.a.isfinite().all() and scaled.b.isfinite().all()):
            raise RequestError(
                f"The adapter in {directory} holds numbers in {name} that are not finite in {dtype}: it is "
                "broken, or "
                "was trained with a wider type."
            )
        for layer, rows in layers[name].items():
            if layer in modules:
                raise RequestError(f"{weights} changes {layer} twice: {name} is another name of it.")
            own = LowRank(scaled.a, scaled.b[rows])
            modules[layer] = LowRank(*(tensor.pin_memory() for tensor in own)) if pin_memory else own
    return Adapter(digest.hexdigest(), max(low_rank.a.shape[0] for low_rank in modules.values()), modules)


class _Options:
    """The scaling in adapter_config.json; unsupported entries are refused."""

    def __init__(self, path: Path, entries: dict[str, Any]) -> None:
        if entries.get("peft_type") != "LORA":
            raise RequestError(f"{path} has peft_type {entries.get('peft_type')!r}; only LORA is served.")
        for option, what in _REFUSED_OPTIONS.items():
            if entries.get(option):
                raise RequestError(
                    f"{path} sets {option}, that is {what}, which is not served; train without it."
                )
        if entries.get("bias", "none") != "none":
            raise RequestError(f"{path} sets bias to {entries['bias']!r}, but trained biases are not served.")
        start = str(entries.get("init_lora_weights", True)).lower()
        if start.startswith(_CHANGES_BASE):
            raise RequestError(
                f"{path} sets init_lora_weights to {start!r}, which changes the base model too; convert the "
                "adapter to "
                "a plain one when saving it (path_initial_model_for_weight_conversion)."
            )
        alpha: Any = entries.get("lora_alpha")
        patterns = entries.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise RequestError(f"{path}: alpha_pattern is {patterns!r}, but must be an object.")
        for name, value in {"lora_alpha": alpha, **patterns}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RequestError(f"{path}: {name} is {value!r}, but must be a finite number.")
        self._alpha = alpha
        self._patterns = [(_ending(pattern, path), value) for pattern, value in patterns.items()]
        self._is_rank_stabilized = bool(entries.get("use_rslora"))

    def scaling(self, name: str, rank: int) -> float:
        """Factor of the update of one layer: alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)."""
        alpha = self._alpha
        for pattern, value in self._patterns:
            if pattern.is_all_of(name):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self._is_rank_stabilized else rank)


def _ending(pattern: str, path: Path) -> NamePattern:
    """As PEFT reads a key of alpha_pattern:
    an expression for the name of a layer, or for what ends it after a dot."""
    try:
        return name_pattern(rf"(?:.*\.)?(?:{pattern})$")
    except ValueError as error:
        raise RequestError(
            f"{path}: the expression {pattern!r} of alpha_pattern is not searched for: {error}."
        ) from None


def _read_matrices(
    path: Path, expected: Mapping[str, Shape], max_rank: int, rows_of_layers: RowsOfLayers
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, tuple[Tensor, Tensor]]]:
    """The layers and their rows, and (A, B), of every module, as stored.
    All names and shapes are checked before the first tensor is read."""
    layers: dict[str, Mapping[str, Tensor]] = {}
    with safe_open(path, framework="pt", device="cpu") as file:
        names: dict[str, dict[str, str]] = {}
        for name in file.keys():  # noqa: SIM118 (no mapping)
            module, matrix = _module_and_matrix(path, name)
            if module not in layers:
                layers[module] = rows_of_layers(module)
            if not layers[module]:
                raise RequestError(
                    f"{path} changes {module}, which this model does not have: it is for another base model."
                )
            if file.get_slice(name).get_dtype() not in FLOAT_TYPES:
                raise RequestError(
                    f"{path}: tensor {name!r} must be stored as one of {', '.join(FLOAT_TYPES)}."
                )
            if names.setdefault(module, {}).setdefault(matrix, name) != name:
                raise RequestError(f"{path} holds lora_{matrix} of {module} twice.")
        if not names:
            raise RequestError(f"{path} holds no tensors: the adapter is empty.")
        for module, pair in names.items():
            if len(pair) != 2:
                raise RequestError(f"{path} holds only one of lora_A and lora_B of {module}.")
            a, b = (file.get_slice(pair[matrix]).get_shape() for matrix in "AB")
            shapes = [expected[layer] for layer in layers[module]]
            _check_shapes(path, module, a, b, (sum(shape[0] for shape in shapes), shapes[0][1]), max_rank)
        return layers, {
            name: (file.get_tensor(pair["A"]), file.get_tensor(pair["B"])) for name, pair in names.items()
        }


def _module_and_matrix(path: Path, name: str) -> tuple[str, str]:
    if "lora_magnitude_vector" in name:
        raise RequestError(
            f"{path} holds magnitude vectors (DoRA), which are not served; train without use_dora."
        )
    if any(module in name for module in _EMBEDDING_MODULES):
        raise RequestError(
            f"{path} holds {name!r}: adapters of embeddings and of the output layer are not served; train "
            "with the "
            "attention and MLP layers as target_modules."
        )
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise RequestError(f"{path} holds {name!r}, which is not lora_A or lora_B of a layer of a decoder.")
    return match[1], match[2]


def _check_shapes(
    path: Path, module: str, a: list[int], b: list[int], expected: Shape, max_rank: int
) -> None:
    outputs, inputs = expected
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1 or a[1] != inputs or b[0] != outputs:
        raise RequestError(
            f"{path}: lora_A and lora_B of {module} have shapes {a} and {b}, but the model calls for [r, "
            f"{inputs}] and "
            f"[{outputs}, r]: it is for another base model."
        )
    if a[0] > max_rank:
        raise RequestError(
            f"{path}: {module} has rank {a[0]}, but max_lora_rank is {max_rank}: start the engine with a "
            "larger one."
        )
