"""Translate a GGUF file's metadata into the entries of the config.json it stands for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kernels_triton_free.rotary import default_frequencies, llama3_frequencies
from minivllm.errors import ModelError
from minivllm.families.makers.registry import FAMILIES, find_gguf_family
from minivllm.gguf.end_of_generation import end_of_generation
from minivllm.gguf.gguf_file import LONGROPE_FACTORS, ROPE_FACTORS, GGUFFile

# config.json entry -> metadata key without the architecture prefix
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
MAX_ROTARY_FACTORS = 4096


def read_gguf_config(path: Path) -> dict[str, Any]:
    """config.json entries (transformers 5 spelling) of a GGUF model; ModelError names file and entry."""
    with GGUFFile(path) as file:
        metadata = file.metadata
        name = metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{path} does not name its architecture (general.architecture).")
        family = find_gguf_family(name, str(path))
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{path} has no token_embd.weight matrix, so its vocabulary size is unknown.")
        held = {
            tensor.split(".", 2)[-1] for tensor in file.tensors
        }  # in any layer: not all of them need be alike
        entries: dict[str, Any] = {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "attn_q.bias" in held,
            "attention_k_eq_v": bool(_layers_with(file, "attn_k") - _layers_with(file, "attn_v")),
            "mlp_bias": "ffn_up.bias" in held,
            "use_qk_norm": "attn_q_norm.weight" in held,
            "mamba_proj_bias": "ssm_in.bias" in held,
            "mamba_conv_bias": "ssm_conv1d.bias" in held,
            "dtype": _dtype(file),
        }
        for entry, key in {**_REQUIRED, **_OPTIONAL}.items():
            if entry in family.gguf_by_layer and isinstance(metadata.get(f"{name}.{key}"), list):
                continue
            value = _number(_where_any(metadata.get(f"{name}.{key}")), f"{path}: {name}.{key}")
            if value is not None:
                entries[entry] = value
            elif entry in _REQUIRED and not (
                entry == "intermediate_size" and f"{name}.expert_count" in metadata
            ):
                raise ModelError(f"{path} does not set {name}.{key}.")
        rotated = metadata.get(f"{name}.rope.dimension_count")
        hidden_size, num_heads = entries["hidden_size"], entries["num_attention_heads"]
        if (
            "head_dim" not in entries
            and isinstance(hidden_size, int)
            and isinstance(num_heads, int)
            and num_heads > 0
        ):
            entries["head_dim"] = hidden_size // num_heads
        head_dim = entries.get("head_dim")
        if rotated is not None and rotated != head_dim:
            if not isinstance(rotated, int) or not isinstance(head_dim, int) or not 0 < rotated < head_dim:
                raise ModelError(
                    f"{path}: {name}.rope.dimension_count is {rotated!r}, but must be at most the {head_dim} "
                    "elements "
                    "of a head."
                )
            # Half an element more, so that rounding down gives the very number again.
            entries["partial_rotary_factor"] = (rotated + 0.5) / head_dim
        entries["rope_parameters"] = rope = _rope_parameters(file, name, entries)
        if rope["rope_type"] == "longrope" and "original_max_position_embeddings" in rope:
            entries["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        key = f"{name}.attention.sliding_window"
        window = _number(metadata.get(key), f"{path}: {key}")
        if window and window < entries["max_position_embeddings"] and family.windowed is not None:
            family = FAMILIES[family.windowed]
        if metadata.get(f"{name}.expert_count") and family.with_experts is not None:
            family = FAMILIES[family.with_experts]
        entries["architectures"] = [family.architecture]
        if family.has_windows:
            entries["sliding_window"] = window or None
        if family.from_gguf is not None:
            prefix = f"{name}."
            own = {
                key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
            }
            entries.update(family.from_gguf(own, entries))
        entries["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
        entries["eos_token_id"] = end_of_generation(metadata)
        return entries


def _layers_with(file: GGUFFile, module: str) -> set[str]:
    """Numbers of the layers that have a matrix of this name."""
    return {name.split(".")[1] for name in file.tensors if name.endswith(f".{module}.weight")}


def _where_any(value: Any) -> Any:
    """A list by layer without its zeros:
    layers without KV heads do not attend, and have none of another number."""
    return [entry for entry in value if entry] or 0 if isinstance(value, list) else value


def _number(value: Any, where: str) -> Any:
    """A number, or a list with the same number for every layer; None stays None."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{where} differs between layers, which is not supported.")
        value = value[0]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ModelError(f"{where} is {value!r}, but must be a number.")
    return value


def _dtype(file: GGUFFile) -> str:
    """The float type to compute in: that of the matrices, and bfloat16 when they are quantised."""
    types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(types), "bfloat16")


def _rope_parameters(file: GGUFFile, name: str, entries: dict[str, Any]) -> dict[str, Any]:
    metadata = file.metadata
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_theta" in entries:
        rope["rope_theta"] = entries["rope_theta"]
    if ROPE_FACTORS in file.tensors:
        theta = rope.get("rope_theta", 10000.0)
        if math.prod(file.tensors[ROPE_FACTORS].shape) > MAX_ROTARY_FACTORS or not 0.0 < theta < math.inf:
            raise ModelError(
                f"{file.path}: {ROPE_FACTORS} does not fit rotary heads with the base {theta!r}."
            )
        factors = file.dequantize(ROPE_FACTORS, torch.float64).flatten().tolist()
        rope.update(llama3_parameters(factors, theta, str(file.path)))
        return rope
    if any(stored in file.tensors for stored in LONGROPE_FACTORS.values()):
        return {**rope, **_longrope_parameters(file, name)}
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    key = f"{name}.rope.scaling.factor"
    factor = _number(metadata.get(key), f"{file.path}: {key}")
    if kind == "none" or not factor or factor == 1.0:
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{file.path}: {name}.rope.scaling.type is {kind!r}, but supported are: none, linear, yarn."
        )
    rope.update({"rope_type": kind, "factor": factor})
    if kind == "yarn":
        for entry in ("beta_fast", "beta_slow"):
            key = f"{name}.rope.scaling.yarn_{entry}"
            if metadata.get(key) is not None:
                rope[entry] = _number(metadata[key], f"{file.path}: {key}")
        original = metadata.get(f"{name}.rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
        key = f"{name}.rope.scaling.attn_factor"
        share = _number(metadata.get(key), f"{file.path}: {key}")
        if share is not None and factor > 1:  # llama.cpp multiplies its own default by this
            rope["attention_factor"] = share * (1.0 + 0.1 * math.log(factor))
    return rope


def _longrope_parameters(file: GGUFFile, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "longrope"}
    for entry, stored in LONGROPE_FACTORS.items():
        if stored not in file.tensors or math.prod(file.tensors[stored].shape) > MAX_ROTARY_FACTORS:
            raise ModelError(f"{file.path} holds longrope factors, but {stored} is missing or too long.")
        found[entry] = file.dequantize(stored, torch.float64).flatten().tolist()
    for entry, suffix in (
        ("original_max_position_embeddings", "original_context_length"),
        ("attention_factor", "attn_factor"),
    ):
        key = f"{name}.rope.scaling.{suffix}"
        value = _number(file.metadata.get(key), f"{file.path}: {key}")
        if value is not None:
            found[entry] = value
    return found


STANDS_STILL = 1e20
"""What a frequency is divided by if its elements are not to turn (Gemma 4)."""


def llama3_parameters(factors: list[float], theta: float, source: str) -> dict[str, Any]:
    """Find the rotary parameters of GGUF's ``rope_freqs.weight``, which stores only their effect: those of
    llama3, or proportional ones, where the last frequencies stand still.

    factors: what each rotary frequency is divided by, ``[head_dim / 2]``. The published models use low and
    high frequency factors 1 and 4 over an original context that is a power of two; that choice is rebuilt and
    compared. Raises ModelError when no such choice gives these factors, for the model would be wrong without
    them.
    """
    if all(factor == 1.0 for factor in factors):
        return {}
    turned = sum(factor == 1.0 for factor in factors)
    if all(factor == 1.0 for factor in factors[:turned]) and min(factors[turned:]) >= STANDS_STILL:
        return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    largest = max(factors, default=0.0)
    dim = 2 * len(factors)
    if math.isfinite(largest) and largest > 1:
        for exponent in range(8, 21):
            original = 2**exponent
            stretched = llama3_frequencies(dim, theta, largest, 1.0, 4.0, original)
            expected = (default_frequencies(dim, theta) / stretched).tolist()
            if all(math.isclose(given, wanted, rel_tol=1e-4) for given, wanted in zip(factors, expected)):
                return {
                    "rope_type": "llama3",
                    "factor": largest,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise ModelError(
        f"{source}: {ROPE_FACTORS} holds rotary factors that are not those of a known Llama 3 scaling."
    )
