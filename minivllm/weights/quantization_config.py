"""config.json's quantization_config:
which layers are stored in which format, or one sentence why they cannot be read.

AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022), fp8, MXFP4 as gpt-oss has it, and compressed-tensors, which
names a format for every group of layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.errors import ModelError
from minivllm.stop_conditions.name_pattern import MAX_NAME_LENGTH, name_pattern

logger = logging.getLogger(__name__)

Layout = Literal["awq", "gptq", "packed", "int8", "float8", "mxfp4"]

SUPPORTED = (
    "awq with 4 bits, gptq with 4 and 8, fp8, mxfp4, and compressed-tensors with int4, int8 or fp8 weights"
)
ADVICE = "use the unquantised model (with quantization='int8' or 'int4' if you like) or a GGUF file of it"
COMPRESSED_FORMATS = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Formats of compressed-tensors -> the types of numbers that may be stored so."""
MAX_PATTERNS = 10_000


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How the weight of a linear layer is stored. The layout names its parts (``packed_weights.PARTS``).

    bits: of a number. group_size: inputs that share a scale; 0 for a scale per row, or for the whole tensor.
    block: outputs and inputs that share one (float8). has_zeros: numbers count from a stored zero.
    zeros_minus_one: which is stored less one (GPTQ's first format). is_ordered: inputs belong to groups by a
    stored index. rounds_inputs: the layer's inputs are rounded to 8 bits too.
    """

    layout: Layout
    bits: int = 4
    group_size: int = 0
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    zeros_minus_one: bool = False
    is_ordered: bool = False
    rounds_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint's linear layers are quantised.

    method: the name that config.json gives it. formats: (targets, format): layers by name, by a regular
    expression after "re:", or all with "Linear"; None for layers that are left as they are. ignore: such
    targets too, of layers that are left as they are whatever else names them.
    """

    method: str
    formats: tuple[tuple[tuple[str, ...], WeightFormat | None], ...]
    ignore: tuple[str, ...] = ()

    def format_of(self, module: str) -> WeightFormat | None:
        """The format of a layer: a name counts before an expression, the first one of them,
        that before all; None if none is meant."""
        if len(module) > MAX_NAME_LENGTH or any(_rank(target, module) for target in self.ignore):
            return None
        ranks = [(_rank(target, module), stored) for targets, stored in self.formats for target in targets]
        best = max(ranks, key=lambda pair: pair[0], default=(0, None))
        return best[1] if best[0] else None


def _rank(target: str, module: str) -> int:
    """How closely a target means a module:
    3 by its name, 2 by an expression, 1 as one of all, 0 not at all."""
    if target.startswith("re:"):
        return 2 if name_pattern(target[3:]).begins(module) else 0
    return 3 if target == module else int(target == "Linear")


def read_quantization(entry: Any, source: str) -> StoredQuantization | None:
    """config.json's quantization_config; ModelError names the file, the setting and what is supported."""
    if not entry:
        return None
    if not isinstance(entry, Mapping):
        raise ModelError(f"{source}: quantization_config is {entry!r}, but must be an object.")
    method = entry.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(entry, source)
    if method == "fp8":
        stored = WeightFormat(
            layout="float8", bits=8, block=_block(entry.get("weight_block_size"), source), rounds_inputs=True
        )
    elif method == "mxfp4":
        stored = WeightFormat(layout="mxfp4")
    elif method in ("awq", "gptq"):
        stored = _awq_or_gptq(method, entry, source)
        return StoredQuantization(method=method, formats=(*_dynamic(entry, source), (("Linear",), stored)))
    else:
        raise ModelError(
            f"{source}: quantization_config names {method!r}, but supported are {SUPPORTED}; {ADVICE}."
        )
    return StoredQuantization(method=method, formats=((("Linear",), stored),))


def _awq_or_gptq(method: Literal["awq", "gptq"], entry: Mapping[str, Any], source: str) -> WeightFormat:
    bits, allowed = entry.get("bits", entry.get("w_bit", 4)), (4,) if method == "awq" else (4, 8)
    if isinstance(bits, bool) or bits not in allowed:
        raise ModelError(
            f"{source}: {method} with {bits!r} bits is not supported, only with {_listed(allowed)}: use "
            "another "
            f"checkpoint."
        )
    version = str(entry.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        raise ModelError(
            f"{source}: awq of version {version!r} is not supported, only 'gemm': use another checkpoint."
        )
    size = entry.get("group_size", entry.get("q_group_size", 128))
    if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
        raise ModelError(
            f"{source}: group_size is {size!r}, but must be a positive number, or -1 for whole rows."
        )
    return WeightFormat(
        layout=method,
        bits=bits,
        group_size=max(size, 0),
        has_zeros=True,
        zeros_minus_one=method == "gptq" and entry.get("checkpoint_format", "gptq") != "gptq_v2",
    )


def _dynamic(entry: Mapping[str, Any], source: str) -> list[tuple[tuple[str, ...], WeightFormat | None]]:
    """GPTQ's rules for single layers:
    an expression after "-:" leaves a layer as it is, others change its settings."""
    rules = entry.get("dynamic") or {}
    if not isinstance(rules, Mapping) or len(rules) > MAX_PATTERNS:
        raise ModelError(
            f"{source}: dynamic is {rules!r}, but must be an object of at most {MAX_PATTERNS} rules."
        )
    formats: list[tuple[tuple[str, ...], WeightFormat | None]] = []
    for rule, changes in rules.items():
        pattern = rule.removeprefix("-:").removeprefix("+:")
        _check_pattern(pattern, f"{source}: dynamic")
        if not rule.startswith("-:") and not isinstance(changes, Mapping):
            raise ModelError(
                f"{source}: dynamic[{rule!r}] is {changes!r}, but must be an object of settings."
            )
        stored = None if rule.startswith("-:") else _awq_or_gptq("gptq", {**entry, **changes}, source)
        formats.append(((f"re:{pattern}",), stored))
    return formats


def _block(entry: Any, source: str) -> tuple[int, int] | None:
    if entry is None:
        return None
    if (
        not isinstance(entry, list | tuple)
        or len(entry) != 2
        or not all(_is_whole(n) and n > 0 for n in entry)
    ):
        raise ModelError(f"{source}: weight_block_size is {entry!r}, but must be two positive numbers.")
    return entry[0], entry[1]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(str(value) for value in values)


def _compressed(entry: Mapping[str, Any], source: str) -> StoredQuantization:
    """compressed-tensors: a format for each of its config_groups."""
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(
            f"{source}: config_groups is {groups!r}, but must name the format of at least one group."
        )
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelError(
            f"{source}: sparsity_config.format is {sparsity['format']!r}, but only 'dense' can be read."
        )
    transforms = entry.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ModelError(
            f"{source}: transform_config names transforms, which are not applied here; {ADVICE}."
        )
    if entry.get("kv_cache_scheme"):
        logger.info(
            "%s: the scheme for the KV cache is left out; the engine's own cache dtype decides.", source
        )
    formats = []
    for name, group in groups.items():
        where = f"{source}: config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ModelError(
                f"{where} is {group!r}, but must be an object that describes weights and targets."
            )
        targets = _targets(group.get("targets"), f"{where}.targets")
        formats.append((targets, _scheme(group, group.get("format") or entry.get("format"), where)))
    ignore = _targets(entry.get("ignore") or [], f"{source}: ignore")
    return StoredQuantization(method="compressed-tensors", formats=tuple(formats), ignore=ignore)


def _targets(entry: Any, where: str) -> tuple[str, ...]:
    if not isinstance(entry, list) or not all(isinstance(target, str) for target in entry):
        raise ModelError(f"{where} is {entry!r}, but must list names, expressions behind 're:', or 'Linear'.")
    if len(entry) > MAX_PATTERNS:
        raise ModelError(f"{where} lists {len(entry)} targets, but at most {MAX_PATTERNS} are read.")
    for target in entry:
        if target.startswith("re:"):
            _check_pattern(target[3:], where)
    return tuple(entry)


def _check_pattern(pattern: str, where: str) -> None:
    try:
        name_pattern(pattern)
    except ValueError as error:
        raise ModelError(f"{where}: the expression {pattern!r} is not searched for: {error}.") from None


def _scheme(group: Mapping[str, Any], name: Any, where: str) -> WeightFormat:
    """One group of compressed-tensors. where: file and group, to begin a refusal with."""
    if not isinstance(name, str) or name not in COMPRESSED_FORMATS:
        raise ModelError(
            f"{where}: format is {name!r}, but supported are {', '.join(COMPRESSED_FORMATS)}; {ADVICE}."
        )
    if group.get("output_activations"):
        raise ModelError(f"{where}.output_activations is set, but outputs are not rounded here; {ADVICE}.")
    weights, inputs = _Arguments(group, "weights", where), _Arguments(group, "input_activations", where)
    if not weights:
        raise ModelError(f"{where}.weights is not set, but only formats of weights are read; {ADVICE}.")
    kind = weights.one_of("type", COMPRESSED_FORMATS[name], "int")
    bits = weights.one_of("num_bits", (4, 8) if name == "pack-quantized" else (8,), 8)
    symmetric = weights.one_of("symmetric", (True, False) if kind == "int" else (True,), True)
    weights.one_of("dynamic", (False, None), False)
    group_size: Any = weights.entries.get("group_size")
    inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    allowed = ("tensor", "channel", "group" if kind == "int" else "block")
    strategy = weights.one_of("strategy", allowed, inferred)
    if strategy == "group" and (not _is_whole(group_size) or group_size < 1):
        raise ModelError(f"{where}.weights.group_size is {group_size!r}, but must be a positive number.")
    block = _block(weights.entries.get("block_structure"), where) if strategy == "block" else None
    if strategy == "block" and block is None:
        raise ModelError(f"{where}.weights.block_structure is not set, but strategy is 'block'.")
    order = weights.one_of("actorder", (None, False, "weight", "static", "group", "dynamic"), None)
    if inputs:
        inputs.one_of("num_bits", (8,), 8)
        inputs.one_of("type", (kind,), "int")
        if kind == "int":
            # Numbers of 8 bits are multiplied exactly where both sides have one scale per row.
            inputs.one_of("symmetric", (True,), True)
            inputs.one_of("dynamic", (True,), False)
            inputs.one_of("strategy", ("token",), None)
            if name == "pack-quantized" or strategy == "group" or not symmetric:
                raise ModelError(
                    f"{where}.input_activations is set, but rounded inputs are multiplied with symmetric "
                    "int8 weights "
                    f"of one scale per output only, not with {name} weights of strategy {strategy!r}; "
                    f"{ADVICE}."
                )
    return WeightFormat(
        layout="packed" if name == "pack-quantized" else "int8" if kind == "int" else "float8",
        bits=bits,
        group_size=group_size if strategy == "group" else 0,
        block=block,
        has_zeros=not symmetric,
        is_ordered=order in ("group", "dynamic"),
        rounds_inputs=bool(inputs),
    )


class _Arguments:
    """Entries of a group about its weights or its inputs; false if there are none."""

    def __init__(self, group: Mapping[str, Any], name: str, where: str) -> None:
        self.where = f"{where}.{name}"
        self.entries = group.get(name) or {}
        if not isinstance(self.entries, Mapping):
            raise ModelError(f"{self.where} is {self.entries!r}, but must be an object.")

    def __bool__(self) -> bool:
        return bool(self.entries)

    def one_of(self, field: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self.entries.get(field)
        value = default if value is None else value
        if not any(value is known or (type(value) is type(known) and value == known) for known in allowed):
            listed = " or ".join(repr(known) for known in allowed)
            raise ModelError(f"{self.where}.{field} is {value!r}, but must be {listed} here; {ADVICE}.")
        return value
